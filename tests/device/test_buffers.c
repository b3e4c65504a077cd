/* Operations with buffers of all roles, and with lists of them (tests/c/more_ops.def): on the host, and on device
 * memory with each transport.
 *
 * FAKE_DRIVER names the library of the fake driver.
 */
#include <stdlib.h>

#include "core/failure.h"
#include "devices/transport.h"
#include "execute/body.h"
#include "simulated.h"

enum { MOST = 24, FACTOR = 7, CHUNK = 4096 };

/* The arrays of a call, on the host: what is read, and then what is written. */
struct set {
  int dtype, in, out;
  struct array arrays[MAX_ARRAYS];
  unsigned char *at[MAX_ARRAYS];
  size_t bytes[MAX_ARRAYS];
};

static void add(struct set *set, int dtype, int64_t count, bool written) {
  int i = set->in + set->out;
  set->bytes[i] = (size_t)count * datatype_find(dtype)->bytes;
  set->at[i] = malloc(set->bytes[i] + 1);
  if (set->at[i] == NULL) abort();
  fill(set->at[i], set->bytes[i]);
  if (set->bytes[i] > 0) set->at[i][0] = (unsigned char)i; /* no two alike */
  if (written) blank(set->at[i], set->bytes[i]);
  set->arrays[i] = ARRAY(dtype, count > 0 ? set->at[i] : NULL, count);
  if (written)
    set->out++;
  else
    set->in++;
}

static void add_factor(struct set *set, int32_t factor) {
  add(set, S32, 1, false);
  memcpy(set->at[set->in - 1], &factor, sizeof factor);
}

static void set_free(struct set *set) {
  for (int i = 0; i < set->in + set->out; i++) free(set->at[i]);
}

/* Where the arrays of the last call lay. */
static const void *lying[MAX_ARRAYS];

static ffi_error *call_in(const struct memory *memory, struct set *set, const char *operation,
                          const int64_t attributes[]) {
  struct frame *frame = malloc(sizeof *frame);
  struct array arrays[MAX_ARRAYS];
  int count = set->in + set->out;
  if (frame == NULL) abort();
  memcpy(arrays, set->arrays, sizeof arrays);
  for (int i = 0; i < count && !memory->host; i++) {
    if (set->bytes[i] == 0) continue;
    arrays[i].data = driver->allocate(set->bytes[i]);
    driver->write(arrays[i].data, set->at[i], set->bytes[i]);
  }
  for (int i = 0; i < count; i++) lying[i] = arrays[i].data;
  frame_make_lists(frame, operation, arrays, set->in, arrays + set->in, set->out, attributes);
  ffi_error *error = frame_call_in(memory, frame, operation);
  memset(frame, 0xaa, sizeof *frame); /* XLA takes it back as the handler returns */
  free(frame);
  if (!memory->host) driver->synchronize(xla_stream);
  for (int i = 0; i < count && !memory->host; i++) {
    if (set->bytes[i] == 0) continue;
    if (i >= set->in) driver->read(set->at[i], arrays[i].data, set->bytes[i]);
    driver->release(arrays[i].data);
  }
  return error;
}

/* Where a call runs: on the host, or on the device by a transport. */
static const struct way {
  const char *name;
  bool on_host;
  enum transport transport;
} ways[] = {{"host", true, TRANSPORT_WAIT},
            {"callback", false, TRANSPORT_CALLBACK},
            {"flags", false, TRANSPORT_FLAGS},
            {"wait", false, TRANSPORT_WAIT}};

static ffi_error *call_on(const struct way *way, struct set *set, const char *operation, const int64_t attributes[]) {
  runtime.transport = way->transport;
  runtime.aware = false;
  return call_in(way->on_host ? &memory_host : space, set, operation, attributes);
}

/* What the fake library makes of a sum: each byte with the number of ranks added. */
static void check_sum(const struct set *set, int out, int in, int ranks) {
  for (size_t i = 0; i < set->bytes[in]; i++)
    if (!CHECK_EQUAL(set->at[out][i], (unsigned char)(set->at[in][i] + ranks))) return;
}

static void check_calls(const struct set *set, int out) {
  int32_t calls;
  memcpy(&calls, set->at[out], sizeof calls);
  CHECK_EQUAL(calls, FACTOR);
}

/* Two operands, a number, two results and a number, in one and in chunks. */
TEST(two_of_each) {
  static const int64_t chunks[] = {0, CHUNK};
  FOR_EACH (const struct way *, way, ways)
    FOR_VALUES (int64_t, count, 0, 1, 7, 1024, 5000)
      FOR_EACH (const int64_t *, chunk, chunks) {
        struct communicator *comm = world(1, 3);
        struct set set = {0};
        context("%s, %d elements, chunks of %d", way->name, (int)*count, (int)*chunk);
        fake->reset();
        comm->chunk = *chunk;
        add(&set, F32, *count, false);
        add(&set, F32, *count, false);
        add_factor(&set, FACTOR);
        add(&set, F32, *count, true);
        add(&set, F32, *count, true);
        add(&set, S32, 1, true);
        SUCCEEDS(call_on(way, &set, "sums", (const int64_t[]){registered(comm), reduction("SUM")}));
        check_sum(&set, 3, 0, 3);
        check_sum(&set, 4, 1, 3);
        check_calls(&set, 5);
        CHECK_EQUAL(times_called("MPI_Allreduce"), 2 * (*chunk > 0 && *count > 1024 ? 5 : 1));
        comm->chunk = 0;
        set_free(&set);
      }
}

/* Buffers that differ in length or type go in one. */
TEST(different_ones_are_not_divided) {
  FOR_EACH (const struct way *, way, ways)
    for (int same_type = 0; same_type < 2; same_type++) {
      struct communicator *comm = world(0, 2);
      struct set set = {0};
      int64_t longer = same_type ? 6000 : 5000;
      context("%s, %d", way->name, same_type);
      fake->reset();
      comm->chunk = CHUNK;
      add(&set, F32, 5000, false);
      add(&set, same_type ? F32 : F64, longer, false);
      add_factor(&set, FACTOR);
      add(&set, F32, 5000, true);
      add(&set, same_type ? F32 : F64, longer, true);
      add(&set, S32, 1, true);
      SUCCEEDS(call_on(way, &set, "sums", (const int64_t[]){registered(comm), reduction("SUM")}));
      check_sum(&set, 3, 0, 2);
      check_sum(&set, 4, 1, 2);
      CHECK_EQUAL(times_called("MPI_Allreduce"), 2);
      comm->chunk = 0;
      set_free(&set);
    }
}

/* Chunks of several matrices: rank r's block is this rank's with r - rank added. */
TEST(rows_of_several) {
  static const int64_t chunks[] = {0, CHUNK};
  enum { N = 3000, SIZE = 3, PLACE = 1 };
  FOR_EACH (const struct way *, way, ways)
    FOR_EACH (const int64_t *, chunk, chunks) {
      struct communicator *comm = world(PLACE, SIZE);
      struct set set = {0};
      context("%s, chunks of %d", way->name, (int)*chunk);
      fake->reset();
      comm->chunk = *chunk;
      add(&set, F32, N, false);
      add(&set, F32, N, false);
      add(&set, F32, N * SIZE, true);
      add(&set, F32, N * SIZE, true);
      SUCCEEDS(call_on(way, &set, "stacks", (const int64_t[]){registered(comm)}));
      for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < set.bytes[2 + k]; i++) {
          size_t block = i / set.bytes[k], at = i % set.bytes[k];
          if (!CHECK_EQUAL(set.at[2 + k][i], (unsigned char)(set.at[k][at] + block - PLACE))) return;
        }
      CHECK(times_called("MPI_Allgather") == (*chunk == 0 ? 2 : 2 * ((N * 4 + CHUNK - 1) / CHUNK)));
      comm->chunk = 0;
      set_free(&set);
    }
}

/* Lists of any length, of types of their own. */
TEST(one_for_each_leaf) {
  static const int dtypes[] = {F32, U8, F64, C128};
  FOR_EACH (const struct way *, way, ways)
    FOR_VALUES (int, length, 0, 1, 2, MOST) {
      struct communicator *comm = world(0, 2);
      struct set set = {0};
      context("%s, %d arrays", way->name, *length);
      fake->reset();
      for (int i = 0; i < *length; i++) add(&set, dtypes[i % 4], 3 + i, false);
      add_factor(&set, FACTOR);
      for (int i = 0; i < *length; i++) add(&set, dtypes[i % 4], 3 + i, true);
      add(&set, S32, 1, true);
      SUCCEEDS(call_on(way, &set, "each", (const int64_t[]){registered(comm), reduction("SUM")}));
      for (int i = 0; i < *length; i++) check_sum(&set, *length + 1 + i, i, 2);
      check_calls(&set, 2 * *length + 1);
      CHECK_EQUAL(times_called("MPI_Allreduce"), *length);
      set_free(&set);
    }
}

/* The operations whose buffers are joined, and how many parts the operand and the result have: STACKED: one per rank.
 * On ranks other than root (0) some pass one of them alone. */
enum { ABSENT, SINGLE, STACKED };
static const struct joined {
  const char *name;
  int root_in, root_out, in, out;
  bool reduces, has_root;
} joined[] = {{"allgather", SINGLE, STACKED, SINGLE, STACKED, false, false},
              {"allreduce", SINGLE, SINGLE, SINGLE, SINGLE, true, false},
              {"alltoall", STACKED, STACKED, STACKED, STACKED, false, false},
              {"bcast", SINGLE, ABSENT, ABSENT, SINGLE, false, true},
              {"gather", SINGLE, STACKED, SINGLE, ABSENT, false, true},
              {"reduce", SINGLE, SINGLE, SINGLE, ABSENT, true, true},
              {"scan", SINGLE, SINGLE, SINGLE, SINGLE, true, false},
              {"scatter", STACKED, SINGLE, ABSENT, SINGLE, false, true}};

enum { PARTS = 3 };

/* The leaves from `first` to `last`, of which each has the same data in every set. */
static void add_leaves(struct set *set, const struct joined *row, bool root, int first, int last) {
  static const int64_t counts[] = {3, 0, 17, 5};
  int ins = root ? row->root_in : row->in, outs = root ? row->root_out : row->out;
  for (int i = first; i <= last && ins != ABSENT; i++) {
    add(set, F32, counts[i] * (ins == STACKED ? PARTS : 1), false);
    if (counts[i] > 0) set->at[set->in - 1][0] = (unsigned char)(i + 1);
  }
  for (int i = first; i <= last && outs != ABSENT; i++) add(set, F32, counts[i] * (outs == STACKED ? PARTS : 1), true);
}

TEST(leaves_are_joined) {
  enum { LEAVES = 4 };
  FOR_EACH (const struct way *, way, ways)
    FOR_EACH (const struct joined *, row, joined)
      FOR_VALUES (int64_t, chunk, 0, CHUNK)
        for (int rank = 0; rank < 2; rank++) {
          struct communicator *comm = world(rank, PARTS);
          struct set all = {0}, one[LEAVES] = {{0}};
          int64_t attributes[3] = {registered(comm), row->reduces ? reduction("SUM") : 0, 0}; /* root: 0 */
          context("%s, %s, rank %d", way->name, row->name, rank);
          comm->chunk = *chunk;
          fake->reset();
          add_leaves(&all, row, rank == 0, 0, LEAVES - 1);
          SUCCEEDS(call_on(way, &all, row->name, attributes));
          CHECK_EQUAL(communications(), 1);
          for (int i = 0; i < LEAVES && all.in > 0; i++) {
            fake->reset();
            add_leaves(&one[i], row, rank == 0, i, i);
            SUCCEEDS(call_on(&ways[0], &one[i], row->name, attributes));
            if (all.out > 0) CHECK(memcmp(all.at[LEAVES + i], one[i].at[1], all.bytes[LEAVES + i]) == 0);
            set_free(&one[i]);
          }
          if (all.in == 0) { /* what is received alone, the fake makes of the place in the message */
            struct set whole = {0};
            add(&whole, F32, 3 + 17 + 5, true);
            SUCCEEDS(call_on(&ways[0], &whole, row->name, attributes));
            for (size_t i = 0, at = 0; i < LEAVES; at += all.bytes[i++])
              CHECK(memcmp(all.at[i], whole.at[0] + at, all.bytes[i]) == 0);
            set_free(&whole);
          }
          comm->chunk = 0;
          set_free(&all);
        }
}

TEST(leaves_of_two_types) {
  struct set set = {0};
  for (int i = 0; i < 4; i++) add(&set, i % 2 == 0 ? F32 : S32, 3, i >= 2);
  FAILS(call_in(&memory_host, &set, "allreduce", (const int64_t[]){registered(world(0, 2)), reduction("SUM")}),
        FFI_INTERNAL, "float32 and of int32");
  CHECK_EQUAL(communications(), 0);
  set_free(&set);
}

/* An MPI library that reaches the device gets its pointers; what the core reads itself is copied all the same. */
TEST(the_host_reads_its_own) {
  struct communicator *comm = world(0, 2);
  FOR_VALUES (int32_t, factor, FACTOR, -1) {
    struct set set = {0};
    context("factor %d", *factor);
    fake->reset();
    fake->hollow = true;
    runtime.aware = true;
    runtime.transport = TRANSPORT_WAIT;
    add(&set, F32, 9, false);
    add(&set, F32, 9, false);
    add_factor(&set, *factor);
    add(&set, F32, 9, true);
    add(&set, F32, 9, true);
    add(&set, S32, 1, true);
    ffi_error *error = call_in(space, &set, "sums", (const int64_t[]){registered(comm), reduction("SUM")});
    if (*factor < 0) {
      FAILS(error, FFI_INVALID_ARGUMENT, "jaxmpi.sums", "the factor is -1");
      CHECK_EQUAL(communications(), 0);
    } else {
      SUCCEEDS(error);
      check_calls(&set, 5);
      CHECK_EQUAL(times_called("MPI_Allreduce"), 2);
      for (int i = 0; i < 2; i++)
        CHECK(called("MPI_Allreduce", i)->in == lying[i] && called("MPI_Allreduce", i)->out == lying[3 + i]);
    }
    set_free(&set);
  }
  runtime.aware = false;
}

/* All results of a call that has failed behind its back are ones in all bits. */
TEST(errors_fill_all_results) {
  FOR_EACH (const struct way *, way, ways) {
    struct communicator *comm = world(0, 2);
    struct set set = {0};
    context("%s", way->name);
    fake->reset();
    add(&set, F32, 9, false);
    add(&set, F32, 9, false);
    add_factor(&set, -1);
    add(&set, F32, 9, true);
    add(&set, F32, 9, true);
    add(&set, S32, 1, true);
    ffi_error *error = call_on(way, &set, "sums", (const int64_t[]){registered(comm), reduction("SUM")});
    CHECK_EQUAL(communications(), 0);
    if (way->on_host || way->transport == TRANSPORT_WAIT) {
      FAILS(error, FFI_INVALID_ARGUMENT, "the factor is -1");
    } else {
      SUCCEEDS(error);
      for (int i = 3; i < 6; i++)
        for (size_t k = 0; k < set.bytes[i]; k++)
          if (!CHECK_EQUAL(set.at[i][k], 0xff)) break;
      struct failure *failure = failure_take();
      CHECK(failure != NULL && strstr(failure->text, "the factor is -1") != NULL);
      free(failure);
    }
    set_free(&set);
  }
}

/* Each failure of the driver on the way is an error, and nothing is left behind. */
TEST(failures_of_the_driver) {
  static const char *const cuda[] = {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord", "cuLaunchHostFunc",
                                     "cuMemHostAlloc"};
  static const char *const hip[] = {"hipMemcpyDtoHAsync", "hipMemcpyHtoDAsync", "hipEventRecord", "hipLaunchHostFunc",
                                    "hipHostMalloc"};
  FOR_EACH (const struct way *, way, ways)
    for (int f = 0; f < 5 && !way->on_host; f++)
      for (int nth = 1; nth < 9; nth++) {
        const char *function = space == &memory_cuda ? cuda[f] : hip[f];
        struct communicator *comm = world(0, 2);
        struct set set = {0};
        context("%s, call %d of %s", way->name, nth, function);
        comm->chunk = CHUNK;
        for (int i = 0; i < 2; i++) add(&set, F32, 2000, false);
        add_factor(&set, FACTOR);
        for (int i = 0; i < 2; i++) add(&set, F32, 2000, true);
        add(&set, S32, 1, true);
        driver->reset();
        driver->fail(function, nth, 2);
        ffi_error *error = call_on(way, &set, "sums", (const int64_t[]){registered(comm), reduction("SUM")});
        if (driver->calls(function) >= nth)
          FAILS(error, FFI_INTERNAL, "jaxmpi.sums");
        else
          SUCCEEDS(error);
        driver->reset();
        comm->chunk = 0;
        fake->reset();
        set_free(&set);
        finish();
      }
}

/* Frames that are not what the core expects. */
TEST(wrong_numbers) {
  int64_t attributes[] = {registered(world(0, 2)), reduction("SUM")};
  struct set few = {0}, many = {0};
  add(&few, F32, 3, false);
  add_factor(&few, FACTOR);
  FAILS(call_in(&memory_host, &few, "sums", attributes), FFI_INTERNAL, "2 operands where the core expects 3");
  FAILS(call_in(&memory_host, &few, "each", attributes), FFI_INTERNAL, "0 results where the core expects 1");
  for (int i = 0; i < MAX_BUFFERS + 2; i++) add(&many, F32, 1, false);
  add_factor(&many, FACTOR);
  add(&many, S32, 1, true);
  FAILS(call_in(&memory_host, &many, "each", attributes), FFI_UNIMPLEMENTED, "260 arrays in one call", "pytree");
  CHECK_EQUAL(communications(), 0);
  set_free(&few);
  set_free(&many);
}
