/* Calls that NCCL carries, with the fake NCCL over the fake driver. For arrays of the device and of the host, the
 * results are those of MPI, and no call reaches MPI. For arrays of the device the host does not wait. */
#include <dlfcn.h>

#include "core/failure.h"
#include "core/plan.h"
#include "devices/nccl.h"
#include "devices/transport.h"
#include "fake_nccl.h"
#include "simulated.h"

enum { ROOM = 1 << 14, VERSION = 22809 };
static unsigned char source[ROOM], target[ROOM], expected[ROOM];
static struct fake_nccl *nccl;
static struct abi with_others; /* the ABI of the fake MPI, with other ranks that make communicators of NCCL, too */
static struct {
  int worst, rank, shared; /* the worst code of the other ranks, a rank that has it, and how often `share` was called */
  atomic_int progress;     /* how often `progress` was called */
} others;

static int share(const struct communicator *comm, void *data, size_t bytes) {
  if (comm->rank != 0) memset(data, 0, bytes);
  return others.shared++, 0;
}

static int worst_of(const struct communicator *comm, int32_t mine, int *worst, int *rank) {
  *worst = mine > others.worst ? mine : others.worst;
  *rank = mine > others.worst ? comm->rank : others.rank;
  return 0;
}

static void let_progress(void) { atomic_fetch_add(&others.progress, 1); }

/* A communicator that NCCL serves. MPI carries all calls on the communicators of `world`. */
static struct communicator *served(int rank, int size) {
  static struct communicator *communicators[4][5];
  struct communicator **comm = &communicators[rank][size];
  if (*comm == NULL) {
    CHECK_EQUAL(abi->communicator(fake->comm_new(rank, size), NULL, comm), 0);
    (*comm)->by_nccl = true;
  }
  return *comm;
}

static void open_nccl(void) {
  char why[256] = "";
  const char *path = getenv("FAKE_NCCL");
  if (nccl != NULL) return;
  if (!CHECK_EQUAL(nccl_open(space, 0, path, why, sizeof why), VERSION)) printf("%s\n", why);
  struct fake_nccl *(*get)(void) = NULL;
  void *symbol = dlsym(dlopen(path, RTLD_NOW), "fake_nccl");
  memcpy(&get, &symbol, sizeof get);
  nccl = get();
  with_others = *abi;
  with_others.share = share, with_others.worst = worst_of, with_others.progress = let_progress;
}

void prepare(void) {
  open_nccl();
  runtime.abi = &with_others;
  runtime.self = world(0, 1);
  on(TRANSPORT_CALLBACK, false);
  nccl->reset();
  others.worst = others.rank = others.shared = 0;
}

/* How often the driver ran host functions, copied or waited. */
static int work_of_the_host(void) {
  static const char *const names[] = {"cuLaunchHostFunc",   "cuMemcpyDtoHAsync",   "cuMemcpyHtoDAsync",
                                      "cuMemcpy2DAsync",    "hipLaunchHostFunc",   "hipMemcpyAsync",
                                      "hipMemcpy2DAsync",   "cuStreamSynchronize", "hipStreamSynchronize",
                                      "cuEventSynchronize", "hipEventSynchronize"};
  int count = 0;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) count += driver->calls(names[i]);
  return count;
}

/* --- results --- */

/* A call of an operation with one array. `in`, `out`: elements; -1: this rank does not pass the array. */
struct operands {
  const char *operation;
  int dtype;
  int64_t in, out, attributes[3]; /* the attributes behind the communicator */
  int arrays;                     /* calls of NCCL if the array is not empty */
  bool aliased;
};

static ffi_error *on_host(const struct operands *o, const struct communicator *comm, void *in, void *out) {
  const int64_t attributes[] = {registered(comm), o->attributes[0], o->attributes[1], o->attributes[2]};
  struct frame frame;
  frame_make(&frame, o->operation, array_of(o->dtype, in, o->in), array_of(o->dtype, o->aliased ? in : out, o->out),
             attributes);
  ffi_error *error = frame_call(&frame, o->operation);
  if (o->aliased) memcpy(out, in, array_bytes(o->dtype, o->out));
  return error;
}

static ffi_error *on_device(const struct operands *o, const struct communicator *comm, void *in, void *out) {
  const int64_t attributes[] = {registered(comm), o->attributes[0], o->attributes[1], o->attributes[2]};
  if (o->aliased) memcpy(out, in, array_bytes(o->dtype, o->in));
  struct array from = array_of(o->dtype, o->aliased ? out : in, o->in), to = array_of(o->dtype, out, o->out);
  return call_there(o->operation, &from, o->in >= 0, &to, o->out >= 0, attributes, NULL);
}

static void same_as_by_mpi(const struct operands *o, int rank, int size) {
  context("%s of %lld %s, rank %d of %d%s", o->operation, (long long)o->in, datatype_find(o->dtype)->name, rank, size,
          o->aliased ? ", in place" : "");
  fill(source, ROOM);
  blank(expected, ROOM);
  SUCCEEDS(on_host(o, world(rank, size), source, expected));
  bool empty = o->in <= 0 && o->out <= 0;
  for (int way = 0; way < 2; way++) {
    fill(source, ROOM);
    blank(target, ROOM);
    SUCCEEDS(on_device(o, served(rank, size), source, target)); /* the first call makes the communicator */
    fill(source, ROOM);
    blank(target, ROOM);
    fake->reset();
    nccl->reset();
    driver->reset();
    SUCCEEDS((way == 0 ? on_device : on_host)(o, served(rank, size), source, target));
    CHECK_SAME(target, expected, array_bytes(o->dtype, o->out));
    CHECK(is_blank(target, array_bytes(o->dtype, o->out), ROOM));
    CHECK_EQUAL(communications(), 0);
    CHECK_EQUAL(nccl->groups, !empty);
    CHECK_EQUAL(nccl->arrays, empty ? 0 : o->arrays);
    if (way == 0) CHECK_EQUAL(work_of_the_host(), 0);
  }
}

static void all_of(int dtype, int64_t count, int rank, int size) {
  int64_t all = count * size, sum = reduction("SUM");
  bool root = rank == 0, reduces = dtype != BF16 && dtype != F16 && dtype != BOOL && dtype != S16;
  const struct operands cases[] = {
      {"allgather", dtype, count, all, {0}, 1, false},
      {"alltoall", dtype, all, all, {0}, 2 * size, false},
      {"bcast", dtype, root ? count : -1, root ? -1 : count, {0}, 1, false},
      {"bcast", dtype, root ? count : -1, count, {0}, 1, false},
      {"bcast", dtype, root ? count : -1, count, {0}, 1, root},
      {"gather", dtype, count, root ? all : -1, {0}, root ? 1 + size : 1, false},
      {"scatter", dtype, root ? all : -1, count, {0}, root ? 1 + size : 1, false},
      {"allreduce", dtype, count, count, {sum}, 1, false},
      {"allreduce", dtype, count, count, {sum}, 1, true},
      {"reduce", dtype, count, root ? count : -1, {sum, 0}, 1, false},
      {"reduce", dtype, count, root ? count : -1, {sum, 0}, 1, root},
      {"reduce_scatter", dtype, all, count, {sum}, 1, false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (reduces || i < 7) same_as_by_mpi(&cases[i], rank, size);
}

TEST(results_are_those_of_mpi) {
  static const int places[][2] = {{0, 2}, {1, 2}, {2, 3}};
  for (size_t i = 0; i < sizeof places / sizeof *places; i++)
    FOR_VALUES (int64_t, count, 0, 1, 7, 500) {
      FOR_VALUES (int, dtype, U8, S32, F32, F64, C128, BOOL, S16, BF16)
        if (*count < 500 || *dtype == F32) all_of(*dtype, *count, places[i][0], places[i][1]);
    }
}

/* --- calls that MPI carries, as without NCCL --- */

static void stays(const char *operation, int dtype, struct communicator *comm, int64_t op, const char *function) {
  context("%s of %s", operation, datatype_find(dtype)->name);
  struct operands o = {operation, dtype, 4, 4, {op}, 0, false};
  fake->reset();
  nccl->reset();
  SUCCEEDS(on_device(&o, comm, source, target));
  SUCCEEDS(on_host(&o, comm, source, target));
  CHECK_EQUAL(times_called(function), 2);
  CHECK_EQUAL(nccl->groups, 0);
}

TEST(the_rest_is_mpis) {
  struct communicator *comm = served(0, 2);
  stays("scan", F32, comm, reduction("SUM"), "MPI_Scan");
  stays("exscan", F32, comm, reduction("SUM"), "MPI_Exscan");
  stays("allreduce", S16, comm, reduction("SUM"), "MPI_Allreduce");
  stays("allreduce", F32, comm, reduction("MAX"), "MPI_Allreduce");
  stays("allreduce", C128, comm, reduction("PROD"), "MPI_Allreduce");
  stays("allreduce", S32, comm, reduction_of(operation_handle("PROD"), REDUCER_USER), "MPI_Allreduce");
  stays("allreduce", F32, world(0, 2), reduction("SUM"), "MPI_Allreduce");
}

/* --- several arrays --- */

TEST(the_arrays_of_a_pytree_are_one_group) {
  enum { ARRAYS = 5 };
  struct array in[ARRAYS], out[ARRAYS];
  size_t at = 0;
  struct communicator *comm = served(1, 3);
  fill(source, ROOM);
  for (int i = 0; i < ARRAYS; i++) { /* one of them empty */
    in[i] = ARRAY(S32, source + at, i), out[i] = ARRAY(S32, target + at, i);
    at += 4 * (size_t)i;
  }
  for (int way = 0; way < 2; way++) {
    const int64_t attributes[] = {registered(comm), reduction("SUM")};
    blank(target, ROOM);
    nccl->reset();
    if (way == 0) SUCCEEDS(call_there("allreduce", in, ARRAYS, out, ARRAYS, attributes, NULL));
    if (way == 1) SUCCEEDS(run_lists("allreduce", in, ARRAYS, out, ARRAYS, attributes));
    for (size_t i = 0; i < at; i++) CHECK_EQUAL(target[i], (unsigned char)(source[i] + 3));
    CHECK_EQUAL(nccl->groups, 1);
    CHECK_EQUAL(nccl->arrays, ARRAYS - 1);
  }
}

/* --- plans --- */

/* Rank 0 of 2 sends the last two of five numbers to rank 1, and receives two numbers in front. For a device XLA
 * composes the message, and on the host the core does. The message is a label and two numbers. */
TEST(messages_of_plans) {
  enum { BYTES = LABEL_BYTES + 16 };
  struct communicator *comm = served(0, 2);
  int64_t c = registered(comm);
  double given[] = {0, 40, 50}, got[3] = {0};
  struct numbers flat = {.count = 0}, boxes = {.count = 0};
  PUT(&flat, 4711, 1, 0, BEGINS_AS_MESSAGES, BYTES, BYTES, 1, 1, 0, 0, 0, 0, 3, 3, 1, 0, BYTES, 1, BYTES, BYTES);
  int64_t plan = registered(plan_make(flat.values, flat.count));
  struct array in = ARRAY(F64, given, 3), out = ARRAY(F64, got, 3);
  SUCCEEDS(call_there("exchange", &in, 1, &out, 1, (const int64_t[]){c, plan}, NULL));
  unsigned char right[BYTES];
  for (int i = 0; i < BYTES; i++) right[i] = (unsigned char)(((const unsigned char *)given)[i] + 1);
  CHECK_SAME(got, right, BYTES);
  CHECK_EQUAL(nccl->arrays, 2);
  CHECK_EQUAL(work_of_the_host() - driver->calls("cuStreamSynchronize") - driver->calls("hipStreamSynchronize") -
                  driver->calls("cuEventSynchronize") - driver->calls("hipEventSynchronize"),
              0);
  PUT(&boxes, 4711, 1, 0, BEGINS_AS_OPERANDS, BYTES, BYTES, 1, 1, 1, 0, 1, 0, 5, 5, 1, 0, BYTES, 1, BYTES, BYTES);
  PUT(&boxes, 0, LABEL_BYTES, 24, 16, 0, 0, 0, 0, 0, BYTES + LABEL_BYTES, 0, 16, 0, 0, 0, 0);
  const struct plan *of_boxes = plan_make(boxes.values, boxes.count);
  if (!CHECK(of_boxes != NULL)) return;
  double field[] = {10, 20, 30, 40, 50}, result[5] = {0};
  nccl->reset();
  fake->reset();
  struct array from = ARRAY(F64, field, 5), to = ARRAY(F64, result, 5);
  SUCCEEDS(run_lists("exchange", &from, 1, &to, 1, (const int64_t[]){c, registered(of_boxes)}));
  CHECK_SAME(result, right + LABEL_BYTES, 16);
  CHECK_SAME(result + 2, field + 2, 24);
  CHECK_EQUAL(nccl->arrays, 2);
  CHECK_EQUAL(communications(), 0);
}

/* --- order --- */

static void *second_stream;

static ffi_error *give_sum(struct communicator *comm, void *in, void *out) {
  return GIVE("allreduce", ARRAY(S32, in, 100), ARRAY(S32, out, 100), registered(comm), reduction("SUM"));
}

/* With two streams and two communicators the second call waits for the first one. */
TEST(a_call_waits_for_the_one_before_on_another_stream) {
  void *first_stream = xla_stream;
  if (second_stream == NULL) second_stream = driver->stream();
  char *a = driver->allocate(400), *b = driver->allocate(400), *c = driver->allocate(400);
  fill(source, 400);
  driver->write(a, source, 400);
  SUCCEEDS(give_sum(served(0, 2), a, b));
  SUCCEEDS(give_sum(served(0, 3), a, b));
  driver->synchronize(first_stream);
  driver->block(first_stream, true);
  SUCCEEDS(give_sum(served(0, 2), a, b));
  xla_stream = second_stream;
  SUCCEEDS(give_sum(served(0, 3), b, c));
  struct timespec pause = {0, 20000000};
  nanosleep(&pause, NULL);
  CHECK_EQUAL(nccl->outstanding, 2);
  CHECK(others.progress > 0); /* MPI progresses while calls do not end */
  driver->block(first_stream, false);
  CHECK_EQUAL(driver->synchronize(second_stream), 0);
  xla_stream = first_stream;
  driver->read(target, c, 400);
  for (int i = 0; i < 400; i++)
    if (!CHECK_EQUAL(target[i], (unsigned char)(source[i] + 5))) break;
  driver->release(a), driver->release(b), driver->release(c);
}

/* Wait until 64 calls have not ended, store how many there are a moment later, and let the stream go on. */
static void *let_go_on(void *outstanding) {
  struct timespec pause = {0, 20000000};
  while (nccl->outstanding < 64) nanosleep(&pause, NULL);
  nanosleep(&pause, NULL);
  *(int *)outstanding = nccl->outstanding;
  driver->block(xla_stream, false);
  return NULL;
}

/* The follower reports each call that does not end, so the host must not be further ahead than it can follow. */
TEST(the_host_is_64_calls_ahead_at_most) {
  char *a = driver->allocate(400);
  int outstanding = 0;
  pthread_t thread;
  SUCCEEDS(give_sum(served(0, 2), a, a));
  driver->synchronize(xla_stream);
  driver->block(xla_stream, true);
  CHECK_EQUAL(pthread_create(&thread, NULL, let_go_on, &outstanding), 0);
  for (int i = 0; i < 100; i++) SUCCEEDS(give_sum(served(0, 2), a, a));
  pthread_join(thread, NULL);
  CHECK_EQUAL(outstanding, 64);
  CHECK_EQUAL(driver->synchronize(xla_stream), 0);
  driver->release(a);
}

/* --- communicators --- */

static struct communicator *fresh(void) {
  struct communicator *comm;
  CHECK_EQUAL(abi->communicator(fake->comm_new(0, 2), NULL, &comm), 0);
  comm->by_nccl = true;
  return comm;
}

/* MPI_Comm_free with work outstanding waits for the work, and frees the communicator of NCCL, too. */
TEST(communicators_are_freed) {
  int before = nccl->live;
  char *a = driver->allocate(400);
  for (int i = 0; i < 10; i++) {
    struct communicator *comm = fresh();
    CHECK(comm->nccl == NULL);
    for (int k = 0; k < 5; k++) SUCCEEDS(give_sum(comm, a, a));
    CHECK_EQUAL(nccl->live, before + 1);
    CHECK_EQUAL(others.shared, i + 1);
    fake->comm_free(comm->handle);
    CHECK_EQUAL(nccl->live, before);
    FAILS(give_sum(comm, a, a), FFI_FAILED_PRECONDITION, "freed since");
  }
  driver->synchronize(xla_stream);
  driver->release(a);
}

TEST(a_communicator_that_cannot_be_made) {
  struct communicator *comm = fresh();
  char *a = driver->allocate(400);
  int before = nccl->live;
  others.worst = 3, others.rank = 1;
  FAILS(give_sum(comm, a, a), FFI_INTERNAL, "failed on rank 1", "Nothing was sent");
  others.worst = 0;
  nccl->fail("CommInitRankConfig", 1, 5);
  FAILS(give_sum(comm, a, a), FFI_INTERNAL,
        "ncclCommInitRankConfig failed on rank 0: an error of the fake (code 5): asked");
  nccl->fail("GetUniqueId", 1, 5);
  FAILS(give_sum(comm, a, a), FFI_INTERNAL, "ncclGetUniqueId failed");
  CHECK_EQUAL(nccl->live, before);
  CHECK_EQUAL(nccl->groups, 0);
  SUCCEEDS(give_sum(comm, a, a));
  fake->comm_free(comm->handle);
  driver->synchronize(xla_stream);
  driver->release(a);
}

/* --- failures --- */

TEST(each_function_of_nccl_fails) {
  static const char *const names[] = {"GroupStart", "GroupEnd", "AllGather", "AllReduce",    "Broadcast",
                                      "Recv",       "Reduce",   "Send",      "ReduceScatter"};
  struct communicator *comm = served(0, 3);
  int64_t sum = reduction("SUM");
  const struct operands cases[] = {{"allgather", F32, 4, 12, {0}, 0, false},
                                   {"alltoall", F32, 12, 12, {0}, 0, false},
                                   {"bcast", F32, 4, 4, {0}, 0, false},
                                   {"gather", F32, 4, 12, {0}, 0, false},
                                   {"allreduce", F32, 4, 4, {sum}, 0, false},
                                   {"reduce", F32, 4, 4, {sum, 0}, 0, false},
                                   {"reduce_scatter", F32, 12, 4, {sum}, 0, false}};
  int failed = 0;
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
      for (int nth = 1; nth <= 3; nth++) {
        context("%s, %s failing at call %d", cases[k].operation, names[i], nth);
        nccl->reset();
        SUCCEEDS(on_device(&cases[k], comm, source, target));
        nccl->reset();
        nccl->fail(names[i], nth, 5);
        ffi_error *error = (nth == 2 ? on_host : on_device)(&cases[k], comm, source, target);
        if (nccl->calls(names[i]) < nth) {
          SUCCEEDS(error);
          continue;
        }
        FAILS(error, FFI_INTERNAL, names[i], "an error of the fake (code 5)", cases[k].operation);
        CHECK_EQUAL(nccl->groups, 0);
        failed++;
      }
  CHECK(failed > 20);
  nccl->reset();
}

static struct operands operands_of_sum(void) {
  struct operands o = {"allreduce", F32, 100, 100, {reduction("SUM")}, 0, false};
  return o;
}

static ffi_error *sum_there(void *comm) {
  struct operands o = operands_of_sum();
  return on_device(&o, comm, source, target);
}

static ffi_error *sum_here(void *comm) {
  struct operands o = operands_of_sum();
  return on_host(&o, comm, source, target);
}

static ffi_error *sum_of_two(void *unused) {
  struct communicator *comm = fresh();
  ffi_error *error = sum_there(comm);
  if (error == NULL) error = sum_here(comm);
  fake->comm_free(comm->handle);
  (void)unused;
  return error;
}

TEST(each_function_of_the_driver_fails) {
  driver_has_others = true; /* the follower */
  driver_fails("a sum of the device", "allreduce", sum_there, served(0, 2));
  driver_fails("a sum of the host", "allreduce", sum_here, served(0, 2));
  driver_fails("the first sums of a communicator", "allreduce", sum_of_two, NULL);
}

/* --- threads --- */

static void *sum_in_thread(void *comm) {
  FAILS(sum_there(comm), FFI_FAILED_PRECONDITION, "another thread of this process has used NCCL", "Nothing was sent");
  CHECK_EQUAL(nccl->groups, 0);
  SUCCEEDS(sum_here(comm)); /* for arrays of the host XLA, and not the program, chooses the thread */
  return NULL;
}

TEST(another_thread_gets_an_error) {
  struct communicator *comm = served(0, 2);
  pthread_t thread;
  SUCCEEDS(sum_there(comm));
  nccl->reset();
  CHECK_EQUAL(pthread_create(&thread, NULL, sum_in_thread, comm), 0);
  pthread_join(thread, NULL);
  SUCCEEDS(sum_there(comm));
}

/* --- opening --- */

/* Arrays of the host go to the device that JAX uses, which need not be the driver's first. */
TEST(the_device_of_jax) {
  char why[256];
  setenv("FAKE_DEVICES", "2", 1);
  nccl_finish();
  CHECK_EQUAL(nccl_open(space, 1, getenv("FAKE_NCCL"), why, sizeof why), VERSION);
  void *of_first = xla_stream;
  driver->device = 1;
  void *of_second = driver->stream();
  driver->device = 0;
  struct communicator *comm = fresh();
  SUCCEEDS(sum_here(comm));
  FAILS(sum_there(comm), FFI_FAILED_PRECONDITION, "These arrays are on another one");
  xla_stream = of_second;
  SUCCEEDS(sum_there(comm));
  xla_stream = of_first;
  fake->comm_free(comm->handle);
  nccl_finish();
  CHECK_EQUAL(nccl_open(space, 0, getenv("FAKE_NCCL"), why, sizeof why), VERSION);
}

TEST(libraries_that_cannot_be_used) {
  char why[256];
  CHECK_EQUAL(nccl_open(space, 0, "libnowhere.so", why, sizeof why), 0);
  CHECK(strstr(why, "libnowhere.so cannot be loaded") != NULL);
  CHECK_EQUAL(nccl_open(space, 0, getenv("FAKE_DRIVER"), why, sizeof why), 0);
  CHECK(strstr(why, "has no nccl") != NULL);
  setenv("FAKE_NCCL_VERSION", "21705", 1);
  CHECK_EQUAL(nccl_open(space, 0, getenv("FAKE_NCCL"), why, sizeof why), 0);
  CHECK(strstr(why, "is NCCL 2.17.5: install 2.18 or later") != NULL);
  unsetenv("FAKE_NCCL_VERSION");
  setenv("FAKE_NCCL_FAIL", "GetVersion", 1);
  CHECK_EQUAL(nccl_open(space, 0, getenv("FAKE_NCCL"), why, sizeof why), 0);
  CHECK(strstr(why, "ncclGetVersion") != NULL);
  unsetenv("FAKE_NCCL_FAIL");
  CHECK_EQUAL(nccl_open(space, 0, getenv("FAKE_NCCL"), why, sizeof why), VERSION);
}
