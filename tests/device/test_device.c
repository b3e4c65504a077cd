/* Operations on device memory, on each transport, with the fake driver. They must have the same results and MPI calls
 * as on the host, break no rule of the driver, return each failure of the driver as an error, and leave nothing behind.
 */
#include <dlfcn.h>

#include "core/failure.h"
#include "core/plan.h"
#include "devices/jobs.h"
#include "devices/transport.h"
#include "execute/body.h"
#include "execute/compare.h"
#include "requests/table.h"
#include "simulated.h"

enum { ROOM = 1 << 16, STATUS_ROOM = 64 };

/* --- an operation on the host and on the device --- */

struct operands {
  const char *operation;
  int dtype;
  int64_t in, out; /* elements, -1: none is passed */
  int64_t attributes[MAX_ATTRIBUTES];
  bool aliased; /* XLA has let the result take the operand's place */
};

/* Runs it on `memory`, from `source` to `target`, both on the host; `result` gets the error. */
static ffi_error *host_run(const struct operands *o, void *source, void *target) {
  struct frame frame;
  frame_make(&frame, o->operation, array_of(o->dtype, source, o->in),
             array_of(o->dtype, o->aliased ? source : target, o->out), o->attributes);
  ffi_error *error = frame_call(&frame, o->operation);
  if (o->aliased && target != source) memcpy(target, source, array_bytes(o->dtype, o->out));
  return error;
}

static ffi_error *device_call(const struct operands *o, const void *source, void *target) {
  if (o->aliased) memcpy(target, source, array_bytes(o->dtype, o->in));
  struct array in = array_of(o->dtype, o->aliased ? target : (void *)(uintptr_t)source, o->in);
  struct array out = array_of(o->dtype, target, o->out);
  return call_there(o->operation, &in, o->in >= 0, &out, o->out >= 0, o->attributes, NULL);
}

/* A sum of float64 on two ranks: all of it, or a call with the arrays on the device. */
static struct operands sum_of(int64_t count) {
  return (struct operands){"allreduce", F64, count, count, {registered(world(0, 2)), reduction("SUM")}, false};
}

static ffi_error *give_reduction(int64_t op, void *in, void *out, int64_t count) {
  return GIVE("allreduce", ARRAY(F64, in, count), ARRAY(F64, out, count), registered(world(0, 2)), op);
}

/* --- results --- */

/* All operations on communicators of some sizes, as `count` elements a rank. */
static void for_operations(int dtype, int64_t count,
                           void (*body)(const struct operands *, const struct communicator *)) {
  static const struct {
    int rank, size;
  } places[] = {{0, 1}, {0, 2}, {1, 2}, {2, 3}};
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    struct communicator *comm = world(places[i].rank, places[i].size);
    int64_t c = registered(comm), sum = reduction("SUM"), all = count * comm->size, self = comm->rank;
    bool root = comm->rank == 0;
    const struct operands cases[] = {
        {"allgather", dtype, count, all, {c}, false},
        {"allreduce", dtype, count, count, {c, sum}, false},
        {"allreduce", dtype, count, count, {c, sum}, true},
        {"alltoall", dtype, all, all, {c}, false},
        {"barrier", dtype, -1, -1, {c}, false},
        {"bcast", dtype, root ? count : -1, root ? -1 : count, {c, 0}, false},
        {"bcast", dtype, root ? count : -1, count, {c, 0}, false},
        {"bcast", dtype, root ? count : -1, count, {c, 0}, root},
        {"gather", dtype, count, root ? all : -1, {c, 0}, false},
        {"reduce", dtype, count, root ? count : -1, {c, sum, 0}, false},
        {"reduce", dtype, count, root ? count : -1, {c, sum, 0}, root},
        {"scan", dtype, count, count, {c, sum}, false},
        {"scan", dtype, count, count, {c, sum}, true},
        {"scatter", dtype, root ? all : -1, count, {c, 0}, false},
        {"sendrecv", dtype, count, count, {c, self, 3, 3, self, 0}, false},
        {"sendrecv", dtype, count, count, {c, fake->proc_null, 3, 3, fake->proc_null, 0}, false},
        {"recv", dtype, -1, count, {c, fake->proc_null, 0, 3}, false},
        {"send", dtype, count, -1, {c, fake->proc_null, 3}, false},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
      context("%s of %lld, rank %d of %d, transport %s, chunks of %lld", cases[k].operation, (long long)count,
              comm->rank, comm->size, runtime.aware ? "aware" : transport_names[runtime.transport],
              (long long)comm->chunk);
      body(&cases[k], comm);
    }
  }
}

static unsigned char source[ROOM], target[ROOM], host_source[ROOM], host_target[ROOM];

static void same_as_on_host(const struct operands *o, const struct communicator *comm) {
  fill(source, ROOM);
  fill(host_source, ROOM);
  blank(target, ROOM);
  blank(host_target, ROOM);
  int64_t chunk = comm->chunk;
  struct communicator *whole = registry_at(comm->number);
  fake->reset();
  whole->chunk = 0;
  SUCCEEDS(host_run(o, host_source, host_target));
  whole->chunk = chunk;
  int calls = communications();
  fake->reset();
  SUCCEEDS(device_call(o, source, target));
  CHECK(chunk > 0 ? communications() >= calls : communications() == calls);
  CHECK_SAME(target, host_target, array_bytes(o->dtype, o->out));
  CHECK(is_blank(target, array_bytes(o->dtype, o->out), ROOM));
}

/* Chunks of 4096 bytes; more of them than slots, with and without a rest. */
static void set_chunks(int64_t bytes) {
  for (int size = 1; size <= 3; size++)
    for (int rank = 0; rank < size; rank++) world(rank, size)->chunk = bytes;
}

/* The first bytes of `target` are sums of two ranks. */
static void check_sum(size_t bytes) {
  for (size_t i = 0; i < bytes; i++)
    if (!CHECK_EQUAL(target[i], (unsigned char)(source[i] + 2))) return;
}

/* Arrays on the host go in the same chunks, where the communicator says so: other ranks' may lie on a device. */
static void same_in_chunks(const struct operands *o, const struct communicator *comm) {
  struct communicator *whole = registry_at(comm->number);
  int64_t chunk = comm->chunk;
  for (int i = 0; i < 2; i++) {
    whole->chunk = i == 0 ? 0 : chunk;
    fill(host_source, ROOM);
    blank(i == 0 ? host_target : target, ROOM);
    fake->reset();
    SUCCEEDS(host_run(o, host_source, i == 0 ? host_target : target));
  }
  CHECK_SAME(target, host_target, ROOM);
}

TEST(chunks_on_the_host) {
  set_chunks(LEAST_CHUNK);
  FOR_VALUES (int64_t, count, 0, 1, 4096 / 8, 4096 / 8 + 1, 2000 / 8, 2500) for_operations(F64, *count, same_in_chunks);
  struct communicator *comm = world(0, 2);
  struct operands o = {"alltoall", F64, 2 * 2500, 2 * 2500, {registered(comm)}, false};
  same_in_chunks(&o, comm);
  CHECK_EQUAL(times_called("MPI_Alltoall"), (2500 * 8 + LEAST_CHUNK - 1) / LEAST_CHUNK);
}

TEST_THROUGH(on_all, results_are_those_of_the_host, void) {
  FOR_VALUES (int64_t, count, 0, 1, 7, 1000) {
    for_operations(F64, *count, same_as_on_host);
    for_operations(U8, *count, same_as_on_host);
  }
}

TEST_THROUGH(on_all, chunks_are_joined, void) {
  set_chunks(LEAST_CHUNK);
  FOR_VALUES (int64_t, count, 0, 1, 4096 / 8, 4096 / 8 + 1, 9 * 4096 / 8, 2000 / 8)
    if (*count * 8 * 3 <= ROOM) for_operations(F64, *count, same_as_on_host);
  struct operands o = sum_of(ROOM / 8);
  same_as_on_host(&o, world(0, 2));
  CHECK_EQUAL(times_called("MPI_Allreduce"), ROOM / LEAST_CHUNK);
  CHECK_EQUAL(calls("cuStreamCreate", "hipStreamCreateWithFlags", "sycl::queue::queue"), 3);
}

/* --- the aware transport --- */

/* MPI gets the device's pointers, and what it does not fill is filled there. */
static void device_pointers(const struct operands *o, const struct communicator *comm) {
  blank(target, ROOM);
  fake->reset();
  fake->hollow = true;
  SUCCEEDS(device_call(o, source, target));
  fake->hollow = false;
  (void)comm;
  for (int i = 0; i < fake->call_count; i++) {
    const struct fake_call *call = &fake->calls[i];
    const void *pointers[] = {call->in, call->out};
    for (int k = 0; k < 2; k++)
      if (pointers[k] != NULL && pointers[k] != fake->in_place && (k == 0 ? call->in_bytes : call->out_bytes) > 0)
        CHECK((const unsigned char *)pointers[k] < source || (const unsigned char *)pointers[k] >= source + ROOM);
  }
  if (o->attributes[1] == fake->proc_null && strcmp(o->operation, "recv") == 0)
    CHECK(is_zero(target, 0, array_bytes(o->dtype, o->out)));
  CHECK_EQUAL(driver->live_pinned, 0);
}

TEST(an_aware_library_gets_device_pointers) {
  fill(source, ROOM);
  on(TRANSPORT_FLAGS, true);
  for_operations(F64, 100, device_pointers);
  for_operations(F64, 0, device_pointers);
  struct communicator *comm = world(0, 2);
  context("a reduction of our own");
  struct operands o = {
      "allreduce", F64, 10, 10, {registered(comm), reduction_of(operation_handle("PROD"), REDUCER_USER)}, false};
  same_as_on_host(&o, comm); /* not predefined, as far as the core knows: copied */
}

/* --- requests --- */

static ffi_error *start_there(const char *operation, struct array in, float *id, const int64_t attributes[]) {
  return call_there(operation, &in, in.rank >= 0, &ARRAY(F32, id, 2), 1, attributes, NULL);
}
#define START_THERE(operation, in, id, ...) start_there(operation, in, id, (const int64_t[]){__VA_ARGS__})

static ffi_error *wait_there(const struct communicator *comm, float ids[][2], int count, const struct array out[],
                             int out_count) {
  struct array in[4];
  for (int i = 0; i < count; i++) in[i] = ARRAY(F32, ids[i], 2);
  return call_there("wait", in, count, out, out_count, (const int64_t[]){registered(comm), 0}, NULL);
}

/* MPI gets what is in flight, which is on the host. */
static void check_on_host(void) {
  for (int i = 0; i < fake->call_count; i++)
    CHECK(driver->reach(fake->calls[i].in) == fake->calls[i].in &&
          driver->reach(fake->calls[i].out) == fake->calls[i].out);
}

static void requests_of_operations(const struct communicator *comm) {
  enum { COUNT_OF = 40 };
  float ids[4][2];
  int64_t c = registered(comm);
  struct array operand = ARRAY(F32, source, COUNT_OF), result = ARRAY(F32, target, COUNT_OF);
  fill(source, ROOM);
  blank(target, ROOM);
  fake->reset();
  fake->slow = 2;
  SUCCEEDS(START_THERE("irecv", NONE, ids[0], c, COUNT_OF, F32, comm->rank, 5));
  SUCCEEDS(START_THERE("isend", operand, ids[1], c, comm->rank, 5));
  SUCCEEDS(START_THERE("iallreduce", operand, ids[2], c, reduction("SUM")));
  SUCCEEDS(START_THERE("ibarrier", NONE, ids[3], c));
  CHECK_EQUAL(requests_in_flight(), 4);
  fill(host_source, ROOM);
  fill(source, 16); /* what was given does not matter any more */
  struct array results[] = {result, ARRAY(F32, host_target, COUNT_OF)};
  SUCCEEDS(wait_there(comm, ids, 4, results, 2));
  CHECK_SAME(target, host_source, 4 * COUNT_OF);
  for (int i = 0; i < 4 * COUNT_OF; i++) CHECK_EQUAL(host_target[i], (unsigned char)(host_source[i] + comm->size));
  CHECK(is_blank(target, 4 * COUNT_OF, ROOM));
  check_on_host();
  CHECK_EQUAL(requests_in_flight() + fake->live_requests + fake->queued + fake->live_matched, 0);
}

/* The second and third of five go to the first two, of the same rank. */
static const struct plan *plan_to_itself(int rank) {
  static const struct plan *made[4];
  struct numbers n = {.count = 0};
  enum { BYTES = LABEL_BYTES + 16 };
  PUT(&n, 4711, 1, 0, 0, BYTES, BYTES, 1, 1, 1, 0, 1, 0, 5, 5, rank, 0, BYTES, rank, BYTES, BYTES);
  PUT(&n, 0, LABEL_BYTES, 8, 16, 0, 0, 0, 0, 0, BYTES + LABEL_BYTES, 0, 16, 0, 0, 0, 0);
  if (made[rank] == NULL) made[rank] = plan_make(n.values, n.count);
  return made[rank];
}

static void a_request_of_an_exchange(const struct communicator *comm) {
  double given[] = {1, 2, 3, 4, 5}, got[] = {0, 0, 0, 0, 0}, right[] = {2, 3, 3, 4, 5};
  float id[2];
  int64_t c = registered(comm), plan = registered(plan_to_itself(comm->rank));
  fake->reset();
  SUCCEEDS(START_THERE("exchange_start", ARRAY(F64, given, 5), id, c, plan));
  CHECK_EQUAL(requests_in_flight(), 1);
  struct array in[] = {ARRAY(F64, given, 5), ARRAY(F32, id, 2)}, out = ARRAY(F64, got, 5);
  SUCCEEDS(call_there("exchange_finish", in, 2, &out, 1, (const int64_t[]){c, plan, 0}, NULL));
  CHECK_SAME(got, right, sizeof right);
  check_on_host();
  CHECK_EQUAL(requests_in_flight() + fake->live_requests + fake->queued + fake->live_matched, 0);
}

/* XLA composes a message of six words to the same rank, and two words that stay: the result is these and the message.
 */
static void a_request_of_messages(const struct communicator *comm) {
  enum { BYTES = 24, STAYS = 8 };
  static const struct plan *made[4];
  const int rank = comm->rank;
  struct numbers n = {.count = 0};
  PUT(&n, 4711, 2, 0, BEGINS_AS_MESSAGES, BYTES + STAYS, BYTES, 1, 1, 0, 0, 0, 0, (BYTES + STAYS) / 4);
  PUT(&n, (STAYS + BYTES) / 4, rank, 0, BYTES, rank, BYTES + STAYS, BYTES);
  if (made[rank] == NULL) made[rank] = plan_make(n.values, n.count);
  int32_t given[] = {0, 0, 3, 4, 5, 6, 7, 8}, got[8] = {0};
  float id[2];
  int64_t c = registered(comm), plan = registered(made[rank]);
  fake->reset();
  SUCCEEDS(START_THERE("exchange_start", ARRAY(S32, given, 8), id, c, plan));
  memset(given, 0, sizeof given);
  struct array request = ARRAY(F32, id, 2), out = ARRAY(S32, got, 8);
  SUCCEEDS(call_there("exchange_finish", &request, 1, &out, 1, (const int64_t[]){c, plan, 0}, NULL));
  for (int i = 0; i < 8; i++) CHECK(i == 2 || i == 3 || got[i] == (i < 2 ? 7 + i : i - 1));
  check_on_host();
  CHECK_EQUAL(requests_in_flight() + fake->live_requests + fake->queued + fake->live_matched, 0);
}

/* Also where MPI reaches the device, and also in chunks, which requests are never divided into. */
TEST_THROUGH(on_all, requests_are_staged, void) {
  for (int way = 0; way < 4; way++)
    for (int rank = 0; rank < 3; rank += 2) {
      context("rank %d of %d, transport %s, way %d", rank, rank + 1, transport_names[runtime.transport], way);
      runtime.aware = way & 1;
      set_chunks(way & 2 ? LEAST_CHUNK : 0);
      requests_of_operations(world(rank, rank + 1));
      a_request_of_an_exchange(world(rank, rank + 1));
      a_request_of_messages(world(rank, rank + 1));
    }
}

/* Where nobody waits, a start that has failed has no numbers, and the wait tells why. */
TEST_THROUGH(on_leaving, errors_of_requests_are_deferred, void) {
  struct communicator *comm = world(0, 2);
  float ids[1][2] = {{0, 0}};
  fake->fail("MPI_Isend", 1, 13);
  SUCCEEDS(START_THERE("isend", ARRAY(F32, source, 5), ids[0], registered(comm), 1, 5));
  CHECK(ids[0][0] != ids[0][0] && ids[0][1] != ids[0][1]);
  FAILS(wait_there(comm, ids, 1, NULL, 0), FFI_INTERNAL, "not done, because", "jaxmpi.isend", "MPI_Isend failed");
  CHECK(wait_there(comm, ids, 1, NULL, 0) == NULL);
  was_left("waited for already");
  SUCCEEDS(START_THERE("isend", ARRAY(F32, source, 5), ids[0], registered(comm), 1, 5));
  fake->fail("MPI_Wait", 1, 13);
  SUCCEEDS(wait_there(comm, ids, 1, NULL, 0));
  was_left("jaxmpi.isend on rank 0 of 2: MPI_Wait failed");
  CHECK_EQUAL(requests_in_flight() + fake->live_requests, 0);
}

/* A message of 64 words from this rank to itself, which XLA has composed. */
static ffi_error *exchange_messages(void *words) {
  enum { BYTES = 4 * 64 };
  static const struct plan *plan;
  struct numbers n = {.count = 0};
  PUT(&n, 4711, 3, 0, BEGINS_AS_MESSAGES, BYTES, BYTES, 1, 1, 0, 0, 0, 0, 64, 64, 0, 0, BYTES, 0, BYTES, BYTES);
  if (plan == NULL) plan = plan_make(n.values, n.count);
  const struct array in = ARRAY(S32, words, 64), out = ARRAY(S32, (uint32_t *)words + 64, 64);
  return call_there("exchange", &in, 1, &out, 1, (const int64_t[]){registered(world(0, 2)), registered(plan)}, NULL);
}

TEST_THROUGH(on_all, messages_that_xla_composes, void) {
  uint32_t words[128];
  for (int i = 0; i < 128; i++) words[i] = (uint32_t)(i + 1);
  fake->reset();
  driver->reset();
  SUCCEEDS(exchange_messages(words));
  CHECK_SAME(words + 66, words + 2, 4 * 62);
  CHECK_EQUAL(driver->calls("cuMemcpyDtoHAsync") + calls("cuMemcpyHtoDAsync", "hipMemcpyAsync", "sycl::queue::memcpy"),
              2);
  CHECK_EQUAL(driver->calls("cuMemcpy2DAsync") + driver->calls("hipMemcpy2DAsync"), 0);
  driver->slow = false;
  driver_fails("messages", "exchange", exchange_messages, words);
  driver->slow = true;
  fake->fail("MPI_Mprobe", 1, 16);
  ffi_error *error = exchange_messages(words);
  if (runtime.transport == TRANSPORT_WAIT) {
    FAILS(error, FFI_INTERNAL, "MPI_Mprobe failed");
  } else { /* it is the next operation's, and all bits of what was to be received are set */
    SUCCEEDS(error);
    for (int i = 64; i < 128; i++) CHECK_EQUAL(words[i], UINT32_MAX);
    was_left("MPI_Mprobe failed");
  }
  fake->reset();
}

/* The check of truth values reads them on the host, whatever the transport. */
TEST(check_is_staged) {
  static char text[] = "program.py:1";
  struct operands o = {"check", BOOL, 3, -1, {registered(world(0, 2)), registered(text)}, false};
  for (int aware = 0; aware < 2; aware++) {
    on(TRANSPORT_WAIT, aware);
    memset(source, 0, 3);
    SUCCEEDS(device_call(&o, source, target));
    source[2] = 1;
    FAILS(device_call(&o, source, target), FFI_FAILED_PRECONDITION, "program.py:1");
  }
}

/* --- errors --- */

/* Where nobody waits an error of MPI is the next operation's, and the result is all ones. */
TEST_THROUGH(on_all, errors_are_deferred, void) {
  struct operands o = {"allreduce", S32, 5, 5, {registered(world(0, 2)), reduction("SUM")}, false};
  fake->fail("MPI_Allreduce", 1, 13);
  ffi_error *error = device_call(&o, source, target);
  if (runtime.transport == TRANSPORT_WAIT) {
    FAILS(error, FFI_INTERNAL, "MPI_Allreduce failed");
    return;
  }
  SUCCEEDS(error);
  for (int i = 0; i < 20; i++) CHECK_EQUAL(target[i], 0xff);
  fake->reset();
  FAILS(device_call(&o, source, target), FFI_INTERNAL,
        "jaxmpi.allreduce on rank 0 of 2: not done, because an operation", "MPI_Allreduce failed", "5 of int32");
  CHECK_EQUAL(communications(), 0);
  SUCCEEDS(device_call(&o, source, target)); /* said once */
}

static void *release_stream(void *unused) {
  (void)unused;
  usleep(50000);
  driver->block(xla_stream, false);
  return NULL;
}

/* A communicator is freed while a call on it waits for its turn on the stream: that is waited for. */
static void freed_during(const char *operation, const char *function, struct array in, int64_t dest, int64_t tag) {
  struct communicator *comm;
  CHECK_EQUAL(abi->communicator(fake->comm_new(0, 2), NULL, &comm), 0);
  pthread_t thread;
  fake->reset();
  driver->block(xla_stream, true);
  SUCCEEDS(GIVE(operation, in, NONE, registered(comm), dest, tag)); /* returns although nothing can be done yet */
  CHECK_EQUAL(times_called(function), 0);
  pthread_create(&thread, NULL, release_stream, NULL);
  fake->comm_free(comm->handle);
  CHECK_EQUAL(times_called(function), 1);
  pthread_join(thread, NULL);
  driver->synchronize(xla_stream);
  CHECK(atomic_load(&comm->freed));
}

TEST_THROUGH(on_leaving, freed_before_its_turn, void) {
  void *data = driver->allocate(8);
  freed_during("send", "MPI_Send", ARRAY(F64, data, 1), 1, 3);
  freed_during("barrier", "MPI_Barrier", NONE, 0, 0); /* without buffers */
  driver->release(data);
}

static ffi_error *again(void *data) { return device_call(data, source, target); }

static void each_fails(const struct operands *o) {
  char what[64];
  snprintf(what, sizeof what, "%s of %lld", o->operation, (long long)o->in);
  driver_fails(what, o->operation, again, (void *)(uintptr_t)o);
}

TEST(failures_of_the_driver_are_errors) {
  struct communicator *comm = world(0, 2);
  int64_t c = registered(comm), sum = reduction("SUM");
  const struct operands cases[] = {
      {"allreduce", F64, 10, 10, {c, sum}, false}, {"allreduce", F64, ROOM / 8, ROOM / 8, {c, sum}, true},
      {"allgather", F64, 10, 20, {c}, false},      {"alltoall", F64, 4000, 4000, {c}, false},
      {"bcast", F64, 10, 10, {c, 0}, false},       {"recv", F64, -1, 10, {c, fake->proc_null, 0, 3}, false},
  };
  driver->slow = false;
  set_chunks(LEAST_CHUNK);
  FOR_EACH (const struct operands *, o, cases) {
    on(TRANSPORT_FLAGS, true);
    each_fails(o);
    FOR_EACH (const enum transport *, transport, transports) {
      on(*transport, false);
      each_fails(o);
    }
  }
}

/* --- threads, streams, memory --- */

static void *sender(void *unused) {
  (void)unused;
  static unsigned char data[800], out[800];
  struct operands o = sum_of(100);
  fill(data, sizeof data);
  for (int i = 0; i < 100; i++) SUCCEEDS(device_call(&o, data, out));
  return NULL;
}

TEST_THROUGH(on_all, threads_share_a_stream, void) {
  pthread_t thread;
  struct operands o = {"scan", F64, 30, 30, {registered(world(0, 3)), reduction("SUM")}, false};
  registered(world(0, 2)); /* adding is done by one thread at a time */
  driver->slow = false;
  pthread_create(&thread, NULL, sender, NULL);
  for (int i = 0; i < 100; i++) {
    blank(target, ROOM);
    SUCCEEDS(device_call(&o, source, target));
  }
  pthread_join(thread, NULL);
}

/* Many calls that nobody waits for use the same pinned memory one after the other. */
TEST_THROUGH(on_leaving, pinned_memory_is_reused, void) {
  enum { CALLS = 50, COUNT = 256 };
  unsigned char *ins[CALLS], *outs[CALLS];
  for (int i = 0; i < CALLS; i++) {
    ins[i] = driver->allocate(COUNT);
    outs[i] = driver->allocate(2 * COUNT);
    driver->write(ins[i], source + i * COUNT, COUNT);
    SUCCEEDS(GIVE("allgather", ARRAY(U8, ins[i], COUNT), ARRAY(U8, outs[i], 2 * COUNT), registered(world(1, 2))));
  }
  driver->synchronize(xla_stream);
  for (int i = 0; i < CALLS; i++) {
    driver->read(target, outs[i], 2 * COUNT);
    CHECK_SAME(target + COUNT, source + i * COUNT, COUNT);
    for (int k = 0; k < COUNT; k++) CHECK_EQUAL(target[k], (unsigned char)(source[i * COUNT + k] - 1));
    driver->release(ins[i]);
    driver->release(outs[i]);
  }
  CHECK_EQUAL(driver->live_pinned, runtime.transport == TRANSPORT_FLAGS ? 3 : 1);
}

/* --- what the tests above cannot see: they give nothing to the stream before a call and wait for it after each --- */

/* An operation of MPI that waits until it is let go, as one does whose peers are late. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool open;
  int inside, entered;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void gated(void *in, void *inout, int *count, void *type) {
  (void)in, (void)inout, (void)count, (void)type;
  pthread_mutex_lock(&gate.lock);
  gate.inside++, gate.entered++;
  pthread_cond_broadcast(&gate.changed);
  while (!gate.open) pthread_cond_wait(&gate.changed, &gate.lock);
  gate.inside--;
  pthread_mutex_unlock(&gate.lock);
}

static int64_t gated_number; /* of the operation */

static void make_gated(void) {
  int (*create)(void (*)(void *, void *, int *, void *), int, void *) = NULL;
  void *symbol = dlsym(fake_library, "MPI_Op_create");
  memcpy(&create, &symbol, sizeof create);
  union {
    int small;
    intptr_t large;
  } made = {.large = 0};
  CHECK_EQUAL(create(gated, 1, &made), 0);
  gated_number = reduction_of(abi == &abi_mpich ? made.small : made.large, REDUCER_OURS);
}

void prepare(void) {
  reduction("SUM"); /* made by one thread */
  if (gated_number == 0) make_gated();
  set_chunks(0);
  fill(source, ROOM);
  driver->slow = true;
}

static void gate_close(void) {
  gate.open = false;
  gate.inside = gate.entered = 0;
}

static void gate_reached(void) {
  pthread_mutex_lock(&gate.lock);
  while (gate.entered == 0) pthread_cond_wait(&gate.changed, &gate.lock);
  pthread_mutex_unlock(&gate.lock);
}

static void gate_open(void) {
  pthread_mutex_lock(&gate.lock);
  gate.open = true;
  pthread_cond_broadcast(&gate.changed);
  pthread_mutex_unlock(&gate.lock);
}

enum { SOON = 20000 }; /* microseconds */

static void *open_soon(void *unused) {
  (void)unused;
  usleep(SOON);
  gate_open();
  return NULL;
}

/* A computation that was given to the stream before and makes the operand: it is late. */
struct late {
  void *operand;
  size_t bytes;
  int early; /* calls of MPI before it is there */
};

static void *produce(void *of) {
  struct late *late = of;
  usleep(SOON);
  late->early = communications();
  driver->write(late->operand, source, late->bytes);
  driver->block(xla_stream, false);
  return NULL;
}

TEST_THROUGH(on_all, operands_are_waited_for, void) {
  set_chunks(LEAST_CHUNK);
  for (int aware = 0; aware < 1 + (runtime.transport == TRANSPORT_WAIT); aware++)
    FOR_VALUES (int64_t, count, 10, 3 * LEAST_CHUNK / 8) {
      context("%lld elements, transport %s", (long long)*count, aware ? "aware" : transport_names[runtime.transport]);
      runtime.aware = aware;
      size_t bytes = (size_t)*count * 8;
      struct late late = {driver->allocate(bytes), bytes, 0};
      void *result = driver->allocate(bytes);
      blank(target, ROOM);
      driver->write(late.operand, target, bytes);
      pthread_t thread;
      driver->block(xla_stream, true);
      fake->reset();
      fake->hollow = aware; /* the fake library reaches no device */
      pthread_create(&thread, NULL, produce, &late);
      SUCCEEDS(give_reduction(reduction("SUM"), late.operand, result, *count));
      pthread_join(thread, NULL);
      driver->synchronize(xla_stream);
      CHECK_EQUAL(late.early, 0);
      driver->read(target, result, bytes);
      if (!aware) check_sum(bytes);
      driver->release(late.operand);
      driver->release(result);
    }
}

/* Chunks of a size that the least pinned memory does not hold four of. */
TEST_THROUGH(on_all, each_chunk_has_room, void) {
  enum { CHUNK = 1 << 15, COUNT = 5 * CHUNK / 8 };
  static unsigned char large[COUNT * 8], got[COUNT * 8];
  struct operands o = sum_of(COUNT);
  set_chunks(CHUNK);
  fill(large, sizeof large);
  SUCCEEDS(device_call(&o, large, got));
  for (size_t i = 0; i < sizeof got; i++)
    if (!CHECK_EQUAL(got[i], (unsigned char)(large[i] + 2))) break;
}

/* Lets the nth call of a function fail in a sum; whether it did. */
static bool ends_with_nothing_under_way(const char *function, int nth, int64_t count) {
  size_t bytes = (size_t)count * 8;
  void *in = driver->allocate(bytes), *out = driver->allocate(bytes);
  driver->fail(function, nth, FAKE_LAUNCH_FAILURE);
  gate.entered = 0;
  ffi_error *error = give_reduction(gated_number, in, out, count);
  int entered = 0;
  if (error != NULL) {
    CHECK_EQUAL(gate.inside, 0);
    entered = gate.entered;
  } else
    driver->synchronize(xla_stream);
  driver->release(in); /* a violation where something uses it */
  driver->release(out);
  if (error != NULL) {
    error_free(error);
    driver->synchronize(xla_stream);
    usleep(300);
    CHECK_EQUAL(gate.entered, entered);
  }
  while (driver->depth() > 0) CHECK(space->leave(NULL) == 0);
  CHECK_EQUAL(driver->violations, 0);
  driver->reset();
  transport_finish();
  return error != NULL;
}

/* After an error XLA takes the buffers back at once, and the next call may have the pinned memory: nothing is under way
 * any more. */
TEST_THROUGH(on_all, nothing_is_under_way_after_an_error, void) {
  gate_close();
  gate_open();
  set_chunks(LEAST_CHUNK);
  FOR_VALUES (int64_t, count, 10, 6 * LEAST_CHUNK / 8)
    for (const char *const *function = driver_functions; *function != NULL; function++) {
      /* Leaving the context is too late to be undone. */
      if (strcmp(*function, "cuCtxPopCurrent") == 0 || strcmp(*function, "hipSetDevice") == 0) continue;
      bool failed = true;
      for (int nth = 1; nth < 8 && failed; nth++) {
        context("%lld elements, %s failing at call %d, transport %s", (long long)*count, *function, nth,
                transport_names[runtime.transport]);
        failed = ends_with_nothing_under_way(*function, nth, *count);
      }
    }
}

/* What waits on one stream keeps its pinned memory while operations of another one use theirs. */
TEST_THROUGH(on_leaving, streams_share_no_memory, void) {
  enum { BYTES = 800 };
  gate_close();
  void *first = xla_stream, *second = driver->stream(), *buffers[2];
  for (int i = 0; i < 2; i++) {
    xla_stream = i == 0 ? first : second;
    buffers[i] = driver->allocate(BYTES);
    driver->write(buffers[i], source + i * BYTES, BYTES);
    SUCCEEDS(give_reduction(gated_number, buffers[i], buffers[i], BYTES / 8));
    if (i == 0) gate_reached();
  }
  usleep(SOON / 4); /* the copy of the second one is done */
  gate_open();
  for (int i = 0; i < 2; i++) {
    driver->synchronize(i == 0 ? first : second);
    driver->read(target, buffers[i], BYTES);
    CHECK_SAME(target, source + i * BYTES, BYTES);
    driver->release(buffers[i]);
  }
  xla_stream = first;
}

/* The number of world(0, 2), for threads: what finds it is not made for several. */
static int64_t pair;

/* A thread that has not imported the package has communicated when its call returns. */
static void *sends_at_last(void *data) {
  SUCCEEDS(GIVE("send", ARRAY(U8, data, 8), NONE, pair, 1, 3));
  CHECK_EQUAL(times_called("MPI_Send"), 1);
  return NULL;
}

TEST_THROUGH(on_leaving, other_threads_leave_nothing_to_the_stream, void) {
  pair = registered(world(0, 2));
  struct late late = {driver->allocate(8), 8, 0};
  pthread_t thread, producer;
  driver->block(xla_stream, true);
  pthread_create(&thread, NULL, sends_at_last, late.operand);
  pthread_create(&producer, NULL, produce, &late);
  pthread_join(thread, NULL);
  pthread_join(producer, NULL);
  driver->synchronize(xla_stream);
  driver->release(late.operand);
}

/* A call of another thread, which is with MPI meanwhile. */
static unsigned char own[80];
static void *calls_gated(void *unused) {
  (void)unused;
  struct operands o = {"allreduce", F64, 10, 10, {pair, gated_number}, true};
  SUCCEEDS(device_call(&o, own, own));
  return NULL;
}

TEST_THROUGH(on_all, threads_share_no_memory, void) {
  gate_close();
  pair = registered(world(0, 2));
  pthread_t caller;
  struct operands o = sum_of(10);
  o.aliased = true;
  fill(own, sizeof own);
  pthread_create(&caller, NULL, calls_gated, NULL);
  gate_reached();
  blank(target, ROOM);
  SUCCEEDS(device_call(&o, target, target));
  gate_open();
  pthread_join(caller, NULL);
  CHECK_SAME(own, source, sizeof own);
}

/* The end of the program, while a thread is still in a call, and after one that was left to the stream. */
TEST_THROUGH(on_leaving, the_end_waits_for_calls, void) {
  gate_close();
  pair = registered(world(0, 2));
  pthread_t caller, opener;
  pthread_create(&caller, NULL, calls_gated, NULL);
  gate_reached();
  pthread_create(&opener, NULL, open_soon, NULL);
  transport_finish();
  CHECK_EQUAL(gate.inside, 0);
  CHECK_EQUAL(driver->live_pinned, 0);
  pthread_join(caller, NULL);
  pthread_join(opener, NULL);
}

TEST_THROUGH(on_all, the_end_waits_for_the_stream, void) {
  set_chunks(LEAST_CHUNK);
  FOR_VALUES (int64_t, count, 10, 6 * LEAST_CHUNK / 8) {
    void *data = driver->allocate((size_t)*count * 8);
    SUCCEEDS(give_reduction(reduction("SUM"), data, data, *count));
    transport_finish();
    CHECK_EQUAL(driver->live_pinned, 0);
    CHECK_EQUAL(driver->violations, 0);
    driver->release(data);
  }
}

/* More memory is wanted while an operation that nobody waits for still uses what there is. */
TEST_THROUGH(on_leaving, memory_grows_behind_what_uses_it, void) {
  gate_close();
  static const int64_t counts[] = {100, 10000};
  static unsigned char large[80000], got[80000];
  void *buffers[2];
  pthread_t opener;
  fill(large, sizeof large);
  for (int i = 0; i < 2; i++) {
    buffers[i] = driver->allocate((size_t)counts[i] * 8);
    driver->write(buffers[i], large, (size_t)counts[i] * 8);
    if (i == 1) pthread_create(&opener, NULL, open_soon, NULL);
    SUCCEEDS(give_reduction(gated_number, buffers[i], buffers[i], counts[i]));
  }
  pthread_join(opener, NULL);
  driver->synchronize(xla_stream);
  for (int i = 0; i < 2; i++) {
    driver->read(got, buffers[i], (size_t)counts[i] * 8);
    CHECK_SAME(got, large, counts[i] * 8);
    driver->release(buffers[i]);
  }
}

/* Where ranks compare what they do nothing is left to the stream: a difference is the call's own error, and no chunk
 * behind it goes on. */
static void tells_another_root(int rank, void *data) {
  struct record told;
  memcpy(&told, data, sizeof told);
  told.root += rank;
  memcpy(data, &told, sizeof told);
}

TEST_THROUGH(on_all, what_is_compared_is_waited_for, void) {
  set_chunks(LEAST_CHUNK);
  FOR_VALUES (int64_t, count, 10, 6 * LEAST_CHUNK / 8)
    for (int aware = 0; aware < 2; aware++) {
      struct operands o = {"bcast", F64, -1, *count, {registered(world(0, 2)), 1}, false};
      context("%lld elements, transport %s", (long long)*count, aware ? "aware" : transport_names[runtime.transport]);
      runtime.aware = aware != 0;
      fake->reset();
      blank(target, ROOM);
      compare_on(world(0, 2), INT64_MAX, tells_another_root);
      FAILS(device_call(&o, source, target), FFI_FAILED_PRECONDITION, "the ranks differ", "bcast from root 1 of ",
            "rank 1 calls bcast from root 2 of ");
      CHECK_EQUAL(communications(), 0);
      CHECK(is_blank(target, 0, ROOM));
    }
}

TEST_THROUGH(on_all, what_is_alike_is_compared_once, void) {
  set_chunks(LEAST_CHUNK);
  FOR_VALUES (int64_t, count, 0, 10, 6 * LEAST_CHUNK / 8) {
    struct operands o = sum_of(*count);
    fake->reset();
    compare_on(world(0, 2), INT64_MAX, NULL);
    SUCCEEDS(device_call(&o, source, target));
    CHECK_EQUAL(questions, 1);
    CHECK_EQUAL(times_called("MPI_Allreduce"), *count > LEAST_CHUNK / 8 ? 6 : 1);
    check_sum(array_bytes(o.dtype, o.out));
  }
}

/* Another thread is not told of an error that is not its own: its peers would wait for it. */
static void *sends_once(void *unused) {
  (void)unused;
  static unsigned char data[80], out[80];
  struct operands o = {"send", F64, 10, -1, {pair, 1, 3}, false};
  SUCCEEDS(device_call(&o, data, out));
  return NULL;
}

TEST_THROUGH(on_leaving, errors_are_told_to_the_thread_that_left_them, void) {
  struct operands o = {"allreduce", S32, 5, 5, {registered(world(0, 2)), reduction("SUM")}, false};
  pair = registered(world(0, 2));
  fake->fail("MPI_Allreduce", 1, 13);
  SUCCEEDS(device_call(&o, source, target));
  pthread_t thread;
  pthread_create(&thread, NULL, sends_once, NULL);
  pthread_join(thread, NULL);
  CHECK_EQUAL(times_called("MPI_Send"), 1);
  FAILS(device_call(&o, source, target), FFI_INTERNAL, "an operation before it has failed");
}

/* The end of the program while a daemon thread goes on. */
static atomic_bool stop;
static void *goes_on(void *unused) {
  (void)unused;
  unsigned char data[80] = {0}, out[80];
  struct operands o = {"allreduce", F64, 10, 10, {pair, reduction("SUM")}, false};
  while (!atomic_load(&stop)) {
    ffi_error *error = device_call(&o, data, out);
    if (error != NULL) error_free(error);
  }
  return NULL;
}

TEST(the_end_while_a_thread_goes_on) {
  pair = registered(world(0, 2));
  on(TRANSPORT_WAIT, false);
  driver->slow = false;
  atomic_store(&stop, false);
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, goes_on, NULL);
  for (int i = 0; i < 2000; i++) transport_finish();
  atomic_store(&stop, true);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

/* A user's reduction may be written in Python: it is called where the caller waits, and its error is the call's own. */
TEST_THROUGH(on_leaving, reductions_of_users_are_waited_for, void) {
  struct operands o = {
      "allreduce", S32, 5, 5, {registered(world(0, 2)), reduction_of(operation_handle("PROD"), REDUCER_USER)}, false};
  fake->fail("MPI_Allreduce", 1, 13);
  FAILS(device_call(&o, source, target), FFI_INTERNAL, "MPI_Allreduce failed");
  same_as_on_host(&o, world(0, 2));
}

/* What comes behind an operation on the stream is not done while that is with MPI. */
TEST_THROUGH(on_leaving, the_stream_waits_for_mpi, void) {
  gate_close();
  double one = 1, seen;
  void *data = driver->allocate(8), *behind = driver->allocate(8), *stream_context, *previous;
  driver->write(behind, &one, 8);
  SUCCEEDS(give_reduction(gated_number, data, data, 1));
  CHECK(space->context(xla_stream, &stream_context) == 0 && space->enter(stream_context, &previous) == 0);
  CHECK(space->zero(behind, 8, xla_stream) == 0 && space->leave(previous) == 0);
  gate_reached();
  usleep(SOON / 4);
  driver->read(&seen, behind, 8);
  CHECK(seen == one);
  gate_open();
  driver->synchronize(xla_stream);
  driver->read(&seen, behind, 8);
  CHECK(seen == 0);
  driver->release(data);
  driver->release(behind);
}

/* --- flags --- */

/* Sums of BYTES bytes, of which many are given before the first is done. */
enum { BYTES = 80, SUMS = 100 };
static void *summands[SUMS];

static void give_sums(int64_t sum, int from, int to) {
  for (int i = from; i < to; i++) {
    summands[i] = driver->allocate(BYTES);
    driver->write(summands[i], source + i, BYTES);
    SUCCEEDS(give_reduction(sum, summands[i], summands[i], BYTES / 8));
  }
}

static void release_sums(int from, int to) {
  for (int i = from; i < to; i++) driver->release(summands[i]);
}

static void check_sums(int from, int to) {
  for (int i = from; i < to; i++) {
    driver->read(target, summands[i], BYTES);
    for (int k = 0; k < BYTES; k++)
      if (!CHECK_EQUAL(target[k], (unsigned char)(source[i + k] + 2))) break;
  }
  release_sums(from, to);
}

/* On streams of two devices in turn, with a count that begins again after a few operations, in one and in chunks. */
TEST_THROUGH(where_calls_are_left, flags_count_up_and_begin_again, void) {
  struct operands large = sum_of(ROOM / 8);
  setenv("FAKE_DEVICES", "2", 1);
  driver->device = 1;
  void *first = xla_stream, *second = driver->stream();
  driver->device = 0;
  FOR_VALUES (uint32_t, last, 1, 2, 7, INT32_MAX) {
    context("up to %u", *last);
    on(TRANSPORT_FLAGS, false);
    flags_last = *last;
    for (int i = 0; i < SUMS; i += 10) {
      xla_stream = i % 20 == 0 ? first : second;
      give_sums(reduction("SUM"), i, i + 10);
      if (i % 50 != 0) continue;
      set_chunks(LEAST_CHUNK);
      SUCCEEDS(device_call(&large, source, target));
      set_chunks(0);
      check_sum(ROOM);
    }
    driver->synchronize(first);
    driver->synchronize(second);
    check_sums(0, SUMS);
    CHECK_EQUAL(driver->calls("cuLaunchHostFunc") + driver->calls("hipLaunchHostFunc"), 0);
  }
  flags_last = INT32_MAX;
  xla_stream = first;
  finish();
  unsetenv("FAKE_DEVICES");
}

/* MPI is called in the order in which operations were left to the streams, not in that in which their turns come. */
TEST_THROUGH(where_calls_are_left, flags_keep_the_order_of_streams, void) {
  void *first = xla_stream, *second = driver->stream(), *data = driver->allocate(8);
  on(TRANSPORT_FLAGS, false);
  driver->block(first, true);
  give_sums(reduction("SUM"), 0, 1);
  xla_stream = second;
  SUCCEEDS(GIVE("send", ARRAY(F64, data, 1), NONE, registered(world(0, 2)), 1, 3));
  usleep(SOON);
  CHECK_EQUAL(communications(), 0);
  driver->block(first, false);
  driver->synchronize(second);
  CHECK_EQUAL(communications(), 2);
  CHECK(strcmp(fake->calls[0].name, "MPI_Allreduce") == 0);
  driver->synchronize(first);
  check_sums(0, 1);
  driver->release(data);
  xla_stream = first;
}

/* The flags have been tried on the stream when something else fails, and the program ends. */
TEST_THROUGH(where_calls_are_left, flags_are_freed_after_a_failure, void) {
  set_chunks(LEAST_CHUNK);
  for (int i = 0; i < 10; i++) {
    on(TRANSPORT_FLAGS, false);
    void *in = driver->allocate(ROOM), *out = driver->allocate(ROOM);
    driver->fail(space == &memory_rocm ? "hipStreamCreateWithFlags" : "cuStreamCreate", 1, FAKE_OUT_OF_MEMORY);
    FAILS(give_reduction(reduction("SUM"), in, out, ROOM / 8), FFI_INTERNAL, "out of memory");
    driver->release(in);
    driver->release(out);
    finish();
  }
}

TEST_THROUGH(where_calls_are_left, a_device_without_flags, void) {
  struct operands o = sum_of(10);
  driver->without_flags = true;
  on(TRANSPORT_FLAGS, false);
  for (int i = 0; i < 2; i++) same_as_on_host(&o, world(0, 2));
  CHECK_EQUAL(driver->calls("cuLaunchHostFunc") + driver->calls("hipLaunchHostFunc"), 2);
  CHECK_EQUAL(driver->live_pinned, 1);
  runtime.flags_asked = true;
  FAILS(device_call(&o, source, target), FFI_FAILED_PRECONDITION, "JAXMPI_DEVICE_TRANSPORT=flags is not possible",
        "Leave the variable out");
  runtime.flags_asked = driver->without_flags = false;
}

/* The driver fails while operations wait for their turns, and so do the calls that wait for it: they are dropped. No
 * stream waits for them, and those of another stream are done. */
TEST_THROUGH(where_calls_are_left, what_waits_is_dropped_after_a_failure, void) {
  void *first = xla_stream, *second = driver->stream();
  bool hip = space == &memory_rocm;
  on(TRANSPORT_FLAGS, false);
  driver->block(first, true);
  give_sums(reduction("SUM"), 0, 3);
  xla_stream = second;
  give_sums(reduction("SUM"), 3, 5);
  xla_stream = first;
  fake->reset();
  driver->fail(hip ? "hipMemcpyAsync" : "cuMemcpyHtoDAsync", hip ? 2 : 1, FAKE_LAUNCH_FAILURE);
  driver->fail(hip ? "hipStreamSynchronize" : "cuStreamSynchronize", 1, FAKE_LAUNCH_FAILURE);
  struct operands o = sum_of(10);
  void *data = driver->allocate(BYTES);
  FAILS(give_reduction(reduction("SUM"), data, data, 10), FFI_INTERNAL, "launch failure");
  driver->synchronize(second);
  check_sums(3, 5);
  CHECK_EQUAL(communications(), 2);
  driver->block(first, false);
  CHECK_EQUAL(driver->synchronize(first), 0);
  CHECK_EQUAL(communications(), 2);
  FAILS(device_call(&o, source, target), FFI_INTERNAL, "an operation before it has failed", "Synchronize failed");
  same_as_on_host(&o, world(0, 2));
  release_sums(0, 3);
  driver->release(data);
  driver->reset(); /* a stream that goes on after all does not get the number it waits for, but a later one */
}

/* The device fails for good, while operations wait for their turns or one is with MPI. The end does not wait for what
 * never comes, and what MPI may be using stays. */
TEST_THROUGH(where_calls_are_left, the_end_after_a_failure_of_the_device, void) {
  for (int with_mpi = 0; with_mpi < 2; with_mpi++) {
    gate_close();
    context("with MPI: %d", with_mpi);
    on(TRANSPORT_FLAGS, false);
    fake->reset();
    driver->block(xla_stream, !with_mpi);
    give_sums(gated_number, 0, 3);
    if (with_mpi) gate_reached();
    driver->lose(FAKE_ILLEGAL_ADDRESS);
    transport_finish();
    CHECK_EQUAL(driver->live_pinned, with_mpi ? 3 : 0);
    was_left("illegal memory access");
    gate_open();
    driver->block(xla_stream, false);
    while (driver->live_pinned > 0) transport_finish();
    CHECK_EQUAL(communications(), with_mpi);
    driver->lose(0);
    release_sums(0, 3);
    struct operands o = sum_of(10);
    same_as_on_host(&o, world(0, 2)); /* by the same thread */
    finish();
  }
}
