/* Operations with buffers of all roles, and with lists of them (tests/c/more_ops.def): on the host, and on device
 * memory with each transport. */
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

/* The arrays of `sums`: two operands and a factor, two results and a number of calls. */
static void add_two_sums(struct set *set, int64_t count, int other_type, int64_t other_count, int32_t factor) {
  add(set, F32, count, false);
  add(set, other_type, other_count, false);
  add_factor(set, factor);
  add(set, F32, count, true);
  add(set, other_type, other_count, true);
  add(set, S32, 1, true);
}

/* Where the arrays of the last call lay. */
static const void *lying[MAX_ARRAYS];

static ffi_error *call_in(const struct memory *memory, struct set *set, const char *operation,
                          const int64_t attributes[]) {
  const struct array *out = set->arrays + set->in;
  if (memory->host) return run_lists(operation, set->arrays, set->in, out, set->out, attributes);
  return call_there(operation, set->arrays, set->in, out, set->out, attributes, lying);
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
  on(way->transport, false);
  return call_in(way->on_host ? &memory_host : space, set, operation, attributes);
}

static ffi_error *call_sums(const struct way *way, struct set *set, const struct communicator *comm) {
  return call_on(way, set, "sums", (const int64_t[]){registered(comm), reduction("SUM")});
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

/* In one and in chunks. */
TEST(two_of_each) {
  struct communicator *comm = world(1, 3);
  FOR_EACH (const struct way *, way, ways)
    FOR_VALUES (int64_t, count, 0, 1, 7, 1024, 5000)
      for (comm->chunk = 0; comm->chunk <= CHUNK; comm->chunk += CHUNK) {
        struct set set = {0};
        context("%s, %d elements, chunks of %d", way->name, (int)*count, (int)comm->chunk);
        fake->reset();
        add_two_sums(&set, *count, F32, *count, FACTOR);
        SUCCEEDS(call_sums(way, &set, comm));
        check_sum(&set, 3, 0, 3);
        check_sum(&set, 4, 1, 3);
        check_calls(&set, 5);
        CHECK_EQUAL(times_called("MPI_Allreduce"), 2 * (comm->chunk > 0 && *count > 1024 ? 5 : 1));
        set_free(&set);
      }
  comm->chunk = 0;
}

/* Buffers that differ in length or type go in one. */
TEST(different_ones_are_not_divided) {
  struct communicator *comm = world(0, 2);
  comm->chunk = CHUNK;
  FOR_EACH (const struct way *, way, ways)
    for (int same_type = 0; same_type < 2; same_type++) {
      struct set set = {0};
      context("%s, %d", way->name, same_type);
      fake->reset();
      add_two_sums(&set, 5000, same_type ? F32 : F64, same_type ? 6000 : 5000, FACTOR);
      SUCCEEDS(call_sums(way, &set, comm));
      check_sum(&set, 3, 0, 2);
      check_sum(&set, 4, 1, 2);
      CHECK_EQUAL(times_called("MPI_Allreduce"), 2);
      set_free(&set);
    }
  comm->chunk = 0;
}

/* Chunks of several matrices: rank r's block is this rank's with r - rank added. */
TEST(rows_of_several) {
  enum { N = 3000, SIZE = 3, PLACE = 1 };
  struct communicator *comm = world(PLACE, SIZE);
  FOR_EACH (const struct way *, way, ways)
    for (comm->chunk = 0; comm->chunk <= CHUNK; comm->chunk += CHUNK) {
      struct set set = {0};
      context("%s, chunks of %d", way->name, (int)comm->chunk);
      fake->reset();
      for (int i = 0; i < 4; i++) add(&set, F32, i < 2 ? N : N * SIZE, i >= 2);
      SUCCEEDS(call_on(way, &set, "stacks", (const int64_t[]){registered(comm)}));
      for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < set.bytes[2 + k]; i++) {
          size_t block = i / set.bytes[k], at = i % set.bytes[k];
          if (!CHECK_EQUAL(set.at[2 + k][i], (unsigned char)(set.at[k][at] + block - PLACE))) return;
        }
      CHECK(times_called("MPI_Allgather") == (comm->chunk == 0 ? 2 : 2 * ((N * 4 + CHUNK - 1) / CHUNK)));
      set_free(&set);
    }
  comm->chunk = 0;
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

/* The leaves from `first` to `last`, of which each has the same data in every set. */
static void add_leaves(struct set *set, const struct usual *usual, int first, int last) {
  static const int64_t counts[] = {3, 0, 17, 5};
  for (int i = first; i <= last && usual->in > 0; i++) {
    add(set, F32, counts[i] * usual->in, false);
    if (counts[i] > 0) set->at[set->in - 1][0] = (unsigned char)(i + 1);
  }
  for (int i = first; i <= last && usual->out > 0; i++) add(set, F32, counts[i] * usual->out, true);
}

/* All collectives but the barrier: of several leaves in one message, and of each alone. */
static void join_leaves(const struct way *way, const struct usual *usual) {
  enum { LEAVES = 4 };
  struct set all = {0};
  int64_t attributes[6];
  usual_attributes(usual, NULL, attributes);
  fake->reset();
  add_leaves(&all, usual, 0, LEAVES - 1);
  SUCCEEDS(call_on(way, &all, usual->operation, attributes));
  CHECK_EQUAL(communications(), 1);
  for (int i = 0; i < LEAVES && all.in > 0; i++) {
    struct set one = {0};
    fake->reset();
    add_leaves(&one, usual, i, i);
    SUCCEEDS(call_on(&ways[0], &one, usual->operation, attributes));
    if (all.out > 0) CHECK(memcmp(all.at[LEAVES + i], one.at[1], all.bytes[LEAVES + i]) == 0);
    set_free(&one);
  }
  if (all.in == 0) { /* what is received alone, the fake makes of the place in the message */
    struct set whole = {0};
    add(&whole, F32, 3 + 17 + 5, true);
    SUCCEEDS(call_on(&ways[0], &whole, usual->operation, attributes));
    for (size_t i = 0, at = 0; i < LEAVES; at += all.bytes[i++])
      CHECK(memcmp(all.at[i], whole.at[0] + at, all.bytes[i]) == 0);
    set_free(&whole);
  }
  set_free(&all);
}

TEST(leaves_are_joined) {
  struct communicator *comm = world(1, 3);
  FOR_EACH (const struct way *, way, ways)
    for (int i = 1; i < USUAL_COLLECTIVES; i++)
      for (comm->chunk = 0; comm->chunk <= CHUNK; comm->chunk += CHUNK) {
        context("%s, %s, case %d, chunks of %d", way->name, usuals[i].operation, i, (int)comm->chunk);
        join_leaves(way, &usuals[i]);
      }
  comm->chunk = 0;
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
    on(TRANSPORT_WAIT, true);
    add_two_sums(&set, 9, F32, 9, *factor);
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
}

/* All results of a call that has failed behind its back are ones in all bits. */
TEST(errors_fill_all_results) {
  FOR_EACH (const struct way *, way, ways) {
    struct set set = {0};
    context("%s", way->name);
    fake->reset();
    add_two_sums(&set, 9, F32, 9, -1);
    ffi_error *error = call_sums(way, &set, world(0, 2));
    CHECK_EQUAL(communications(), 0);
    if (way->transport == TRANSPORT_WAIT || space->call == NULL) {
      FAILS(error, FFI_INVALID_ARGUMENT, "the factor is -1");
    } else {
      SUCCEEDS(error);
      for (int i = 3; i < 6; i++)
        for (size_t k = 0; k < set.bytes[i]; k++)
          if (!CHECK_EQUAL(set.at[i][k], 0xff)) break;
      was_left("the factor is -1");
    }
    set_free(&set);
  }
}

static ffi_error *call_again(void *comm) {
  struct set set = {0};
  add_two_sums(&set, 2000, F32, 2000, FACTOR);
  ffi_error *error = call_in(space, &set, "sums", (const int64_t[]){registered(comm), reduction("SUM")});
  set_free(&set);
  return error;
}

/* Each failure of the driver on the way is an error, and nothing is left behind. */
TEST_THROUGH(on_all, failures_of_the_driver, void) {
  struct communicator *comm = world(0, 2);
  comm->chunk = CHUNK;
  driver_fails("two sums", "sums", call_again, comm);
  comm->chunk = 0;
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
