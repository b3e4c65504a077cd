/* Each operation that needs no matched message: the right MPI call with the right arguments, and the right data. */
#include "harness.h"

enum { ROOM = 1024 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM];

void prepare(void) {
  fake->reset();
  fill(in, ROOM);
  blank(out, ROOM);
}

static const struct fake_call *only(const char *function) {
  CHECK_EQUAL(communications(), 1);
  CHECK_EQUAL(times_called(function), 1);
  return called(function, 0);
}

/* What the call says of communicator, type and count. */
static void check_in(const struct fake_call *call, const struct share *s, const void *buffer) {
  CHECK(call->in == buffer);
  CHECK_EQUAL(call->comm, s->comm->handle);
  CHECK_EQUAL(call->in_type, datatype(s->dtype));
  CHECK_EQUAL(call->in_count, s->count);
}

static void check_out(const struct fake_call *call, const struct share *s, const void *buffer) {
  CHECK(call->out == buffer);
  CHECK_EQUAL(call->comm, s->comm->handle);
  CHECK_EQUAL(call->out_type, datatype(s->dtype));
  CHECK_EQUAL(call->out_count, s->count);
}

/* `out` holds a block per rank: rank r's is `block(r)` of `in`, with r - rank added. */
static void check_blocks(const struct share *s, bool one_each) {
  for (int r = 0; r < s->size; r++)
    for (size_t i = 0; i < s->bytes; i++)
      if (!CHECK_EQUAL(out[(size_t)r * s->bytes + i],
                       (unsigned char)(in[(one_each ? (size_t)r * s->bytes : 0) + i] + r - s->rank)))
        return;
  CHECK(is_blank(out, (size_t)s->size * s->bytes, ROOM));
}

TEST_OF(for_all, allgather_stacks) {
  SUCCEEDS(RUN("allgather", ARRAY(s->dtype, in, s->count), MATRIX(s->dtype, out, s->size, s->count), COMM(s->comm)));
  const struct fake_call *call = only("MPI_Allgather");
  check_in(call, s, in);
  check_out(call, s, out);
  check_blocks(s, false);
}

TEST_OF(for_all, alltoall_exchanges) {
  struct array a = MATRIX(s->dtype, in, s->size, s->count), b = MATRIX(s->dtype, out, s->size, s->count);
  SUCCEEDS(RUN("alltoall", a, b, COMM(s->comm)));
  const struct fake_call *call = only("MPI_Alltoall");
  check_in(call, s, in);
  check_out(call, s, out);
  check_blocks(s, true);
}

TEST_OF(for_all, barrier_has_no_buffers) {
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(s->comm)));
  CHECK_EQUAL(only("MPI_Barrier")->comm, s->comm->handle);
}

TEST_OF(for_all, bcast_reads_on_root_and_writes_elsewhere) {
  for (int root = 0; root < s->size; root++) {
    bool mine = root == s->rank;
    prepare();
    SUCCEEDS(RUN("bcast", mine ? ARRAY(s->dtype, in, s->count) : NONE, mine ? NONE : ARRAY(s->dtype, out, s->count),
                 COMM(s->comm), root));
    const struct fake_call *call = only("MPI_Bcast");
    check_in(call, s, mine ? in : out);
    CHECK_EQUAL(call->peer, root);
    for (size_t i = 0; !mine && i < s->bytes; i++) CHECK_EQUAL(out[i], fake_byte(root, (int64_t)i));
    CHECK(is_blank(out, mine ? 0 : s->bytes, ROOM));
  }
}

/* Root's result: its operand handed through, or a copy of it where they are two. */
TEST_OF(for_all, bcast_hands_through_on_root) {
  struct array result = ARRAY(s->dtype, out, s->count);
  SUCCEEDS(RUN("bcast", ARRAY(s->dtype, in, s->count), result, COMM(s->comm), s->rank));
  CHECK(only("MPI_Bcast")->in == in);
  CHECK_EQUAL(memcmp(in, out, s->bytes), 0);
  CHECK(is_blank(out, s->bytes, ROOM));
  blank(out, ROOM);
  fake->reset();
  SUCCEEDS(RUN("bcast", result, result, COMM(s->comm), s->rank));
  CHECK(only("MPI_Bcast")->in == out);
  CHECK(is_blank(out, 0, ROOM));
}

TEST_OF(for_all, gather_stacks_on_root) {
  for (int root = 0; root < s->size; root++) {
    bool mine = root == s->rank;
    prepare();
    SUCCEEDS(RUN("gather", ARRAY(s->dtype, in, s->count), mine ? MATRIX(s->dtype, out, s->size, s->count) : NONE,
                 COMM(s->comm), root));
    const struct fake_call *call = only("MPI_Gather");
    check_in(call, s, in);
    CHECK_EQUAL(call->peer, root);
    CHECK(call->out == (mine ? out : NULL));
    if (!mine) continue;
    check_out(call, s, out);
    check_blocks(s, false);
  }
}

TEST_OF(for_all, scatter_hands_out) {
  for (int root = 0; root < s->size; root++) {
    bool mine = root == s->rank;
    prepare();
    SUCCEEDS(RUN("scatter", mine ? MATRIX(s->dtype, in, s->size, s->count) : NONE, ARRAY(s->dtype, out, s->count),
                 COMM(s->comm), root));
    const struct fake_call *call = only("MPI_Scatter");
    check_out(call, s, out);
    CHECK_EQUAL(call->peer, root);
    CHECK(call->in == (mine ? in : NULL));
    if (mine) check_in(call, s, in);
    for (size_t i = 0; !mine && i < s->bytes; i++) CHECK_EQUAL(out[i], fake_byte(root, (int64_t)i));
    if (mine) CHECK_SAME(out, in + (size_t)s->rank * s->bytes, s->bytes);
    CHECK(is_blank(out, s->bytes, ROOM));
  }
}

/* --- reductions --- */

/* `result` is what `times` ranks make of `given`, and the rest of its room is as it was. */
static void check_reduced(const unsigned char *result, const unsigned char *given, size_t bytes, int times) {
  for (size_t i = 0; i < bytes; i++)
    if (!CHECK_EQUAL(result[i], (unsigned char)(given[i] + times))) return;
}

/* A reduction of `times` ranks to this one, also as root; zero if there are none. Twice: apart, and in place. */
static void reduction_case(const struct share *s, const char *name, const char *function, int times) {
  unsigned char copy[ROOM];
  FOR_VALUES (string, op, "SUM", "MIN")
    for (int in_place = 0; in_place < 2; in_place++) {
      unsigned char *result = in_place ? in : out;
      prepare();
      memcpy(copy, in, ROOM);
      SUCCEEDS(RUN(name, ARRAY(s->dtype, in, s->count), ARRAY(s->dtype, result, s->count), COMM(s->comm),
                   reduction(*op), s->rank));
      const struct fake_call *call = only(function);
      if (!in_place) check_in(call, s, in);
      check_out(call, s, result);
      CHECK(call->op == operation_handle(*op) && call->in == (in_place ? fake->in_place : in));
      CHECK_EQUAL(call->peer, strcmp(name, "reduce") == 0 ? s->rank : 0);
      if (times == 0)
        CHECK(is_zero(result, 0, s->bytes));
      else
        check_reduced(result, copy, s->bytes, times);
      CHECK_SAME(in + s->bytes, copy + s->bytes, ROOM - s->bytes);
      CHECK(is_blank(out, in_place ? 0 : s->bytes, ROOM));
    }
}

TEST_OF(for_all, allreduce_reduces) { reduction_case(s, "allreduce", "MPI_Allreduce", s->size); }

TEST_OF(for_all, scan_reduces_up_to_this_rank) { reduction_case(s, "scan", "MPI_Scan", s->rank + 1); }

/* The result of rank 0 is zero, whatever the library makes of it. */
TEST_OF(for_all, exscan_reduces_the_ranks_before) { reduction_case(s, "exscan", "MPI_Exscan", s->rank); }

/* By one call, and by a reduction for each rank where the counts are more than an int holds. */
TEST_OF(for_all, reduce_scatter_reduces_a_block_for_each_rank) {
  struct array all = MATRIX(s->dtype, in, s->size, s->count), result = ARRAY(s->dtype, out, s->count);
  SUCCEEDS(RUN("reduce_scatter", all, result, COMM(s->comm), reduction("SUM")));
  const struct fake_call *call = only("MPI_Reduce_scatter_block");
  check_out(call, s, out);
  check_reduced(out, in + (size_t)s->rank * s->bytes, s->bytes, s->size);
  CHECK(is_blank(out, s->bytes, ROOM));
  prepare();
  runtime.max_count = 2;
  SUCCEEDS(RUN("reduce_scatter", all, result, COMM(s->comm), reduction("SUM")));
  runtime.max_count = INT32_MAX;
  CHECK_EQUAL(times_called("MPI_Reduce"), s->count > 2 ? s->size * (s->count + 1) / 2 : 0);
  check_reduced(out, in + (size_t)s->rank * s->bytes, s->bytes, s->size);
  CHECK(is_blank(out, s->bytes, ROOM));
}

TEST_OF(for_all, reduce_writes_on_root_alone) {
  reduction_case(s, "reduce", "MPI_Reduce", s->size);
  for (int root = 0; root < s->size; root++) {
    if (root == s->rank) continue;
    prepare();
    SUCCEEDS(RUN("reduce", ARRAY(s->dtype, in, s->count), NONE, COMM(s->comm), reduction("SUM"), root));
    const struct fake_call *call = only("MPI_Reduce");
    check_in(call, s, in);
    CHECK_EQUAL(call->op, operation_handle("SUM"));
    CHECK_EQUAL(call->peer, root);
  }
}

/* --- sending --- */

TEST_OF(for_all, send_passes_its_buffer) {
  for (int dest = 0; dest < s->size; dest++) {
    if (dest == s->rank) continue;
    prepare();
    SUCCEEDS(RUN("send", ARRAY(s->dtype, in, s->count), NONE, COMM(s->comm), dest, 1000 + dest));
    const struct fake_call *call = only("MPI_Send");
    check_in(call, s, in);
    check_envelope(call, dest, 1000 + dest);
  }
}

/* Ranks and tags that are known at run time: those that are TRACED in the program, in the order of the attributes. */
static ffi_error *send_to(int64_t dest, int64_t tag, const int32_t ends[], int count) {
  struct array arrays[3] = {ARRAY(F32, in, 5)};
  for (int i = 0; i < count; i++) arrays[1 + i] = SCALAR(S32, (void *)(uintptr_t)&ends[i]);
  prepare();
  return run_lists("send", arrays, 1 + count, NULL, 0, (const int64_t[]){COMM(world(1, 3)), dest, tag});
}

TEST(ends_are_read_at_run_time) {
  enum { FIRST = 1 << 20 };
  runtime.most_tag = 2 * FIRST - 1;
  SUCCEEDS(send_to(TRACED, 9, (int32_t[]){2}, 1));
  CHECK_EQUAL(only("MPI_Send")->peer, 2);
  CHECK_EQUAL(only("MPI_Send")->tag, 9);
  SUCCEEDS(send_to(0, TRACED, (int32_t[]){7}, 1));
  CHECK_EQUAL(only("MPI_Send")->peer, 0);
  CHECK_EQUAL(only("MPI_Send")->tag, 7);
  SUCCEEDS(send_to(TRACED, TRACED + FIRST, (int32_t[]){2, 7}, 2)); /* of a derivative */
  CHECK_EQUAL(only("MPI_Send")->peer, 2);
  CHECK_EQUAL(only("MPI_Send")->tag, FIRST + 7);
  SUCCEEDS(send_to(TRACED, 9, (int32_t[]){fake->proc_null}, 1));
  FAILS(send_to(TRACED, 9, (int32_t[]){3}, 1), FFI_INVALID_ARGUMENT, "dest is 3, and must be a rank", "0 to 2");
  FAILS(send_to(TRACED, 9, (int32_t[]){-7}, 1), FFI_INVALID_ARGUMENT, "dest is -7, and must be a rank");
  FAILS(send_to(0, TRACED, (int32_t[]){-1}, 1), FFI_INVALID_ARGUMENT, "tag is -1, and must be between 0 and 2097151;");
  FAILS(send_to(0, TRACED + FIRST, (int32_t[]){FIRST}, 1), FFI_INVALID_ARGUMENT,
        "between 0 and 1048575 in a derivative");
  FAILS(send_to(TRACED, TRACED, (int32_t[]){1}, 1), FFI_INTERNAL, "a rank or tag is not passed");
  CHECK_EQUAL(communications(), 0);
  runtime.most_tag = INT32_MAX;
}

/* --- shapes --- */

TEST(a_scalar_is_one_element) {
  struct communicator *comm = world(1, 3);
  prepare();
  SUCCEEDS(RUN("allreduce", SCALAR(F64, in), SCALAR(F64, out), COMM(comm), reduction("SUM")));
  CHECK_EQUAL(called("MPI_Allreduce", 0)->in_count, 1);
  SUCCEEDS(RUN("allgather", SCALAR(F64, in), ARRAY(F64, out, 3), COMM(comm)));
  CHECK_EQUAL(called("MPI_Allgather", 0)->in_count, 1);
  SUCCEEDS(RUN("scatter", NONE, SCALAR(F64, out), COMM(comm), 0));
  CHECK_EQUAL(called("MPI_Scatter", 0)->out_count, 1);
  SUCCEEDS(RUN("send", SCALAR(F64, in), NONE, COMM(comm), 0, 0));
  CHECK_EQUAL(called("MPI_Send", 0)->in_count, 1);
  CHECK(is_blank(out, 3 * 8, ROOM));
}

/* An empty array may come without memory; the other ranks take part, so this one must too. */
TEST(nothing_is_communicated_too) {
  struct communicator *comm = world(0, 2);
  struct array empty = ARRAY(F32, NULL, 0);
  prepare();
  SUCCEEDS(RUN("allreduce", empty, empty, COMM(comm), reduction("SUM")));
  SUCCEEDS(RUN("scan", empty, ARRAY(F32, out, 0), COMM(comm), reduction("SUM")));
  SUCCEEDS(RUN("reduce", empty, empty, COMM(comm), reduction("SUM"), 0));
  SUCCEEDS(RUN("reduce", empty, NONE, COMM(comm), reduction("SUM"), 1));
  SUCCEEDS(RUN("allgather", empty, MATRIX(F32, NULL, 2, 0), COMM(comm)));
  SUCCEEDS(RUN("alltoall", MATRIX(F32, NULL, 2, 0), MATRIX(F32, NULL, 2, 0), COMM(comm)));
  SUCCEEDS(RUN("bcast", NONE, empty, COMM(comm), 1));
  SUCCEEDS(RUN("gather", empty, MATRIX(F32, NULL, 2, 0), COMM(comm), 0));
  SUCCEEDS(RUN("scatter", NONE, empty, COMM(comm), 1));
  SUCCEEDS(RUN("send", empty, NONE, COMM(comm), 1, 0));
  CHECK_EQUAL(communications(), 10);
}

/* Of a rank that has passed too little the end of its part does not come; nor does anything of it, here. */
TEST(what_nobody_has_written_is_an_error) {
  enum { COUNT = 7 };
  struct array one = ARRAY(F32, in, COUNT), all = MATRIX(F32, in, 3, COUNT);
  struct array result = ARRAY(F32, out, COUNT), results = MATRIX(F32, out, 3, COUNT);
  int64_t comm = COMM(world(1, 3));
  for (int hollow = 0; hollow < 2; hollow++) {
    prepare();
    fake->hollow = hollow != 0;
    ffi_error *errors[] = {RUN("allgather", one, results, comm), RUN("alltoall", all, results, comm),
                           RUN("gather", one, results, comm, 1), RUN("bcast", NONE, result, comm, 2),
                           RUN("scatter", NONE, result, comm, 2)};
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
      context("operation %zu, %s", i, hollow ? "nothing comes" : "all comes");
      if (hollow)
        FAILS(errors[i], FFI_FAILED_PRECONDITION, i < 3 ? "rank 0 has passed" : "rank 2 has passed",
              "fewer than the 7 float32");
      else
        SUCCEEDS(errors[i]);
    }
    fake->hollow = true;
    SUCCEEDS(RUN("bcast", ARRAY(F32, in, COUNT), NONE, comm, 1)); /* on root nothing is received */
    SUCCEEDS(RUN("bcast", NONE, ARRAY(F32, out, 1), comm, 2));    /* too short for a mark */
  }
}
