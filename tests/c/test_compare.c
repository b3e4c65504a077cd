/* JAXMPI_CHECK: what a rank tells the others before a collective, and that a difference stops all of them. */
#include "execute/agreement.h"
#include "execute/compare.h"
#include "observe/watchdog.h"

#include "harness.h"

enum { N = 7, PLACE = 1, SIZE = 3, ROOM = 512 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM], uncompared[ROOM];

#define FOR_COLLECTIVES(usual) for (const struct usual *usual = usuals; usual < usuals + USUAL_COLLECTIVES; usual++)

/* --- the other ranks --- */

static struct record mine; /* the last one that this rank has told where they differ */
static void alike(int rank, void *data) {
  struct record told;
  (void)rank;
  memcpy(&told, data, sizeof told);
  if (told.call != 0) mine = told; /* not only whether others change something */
}

/* One rank alone tells something else in one of its numbers. */
static size_t odd_at;
static int64_t odd_by;
static int odd_rank = 2;
static void odd(int rank, void *data) {
  int64_t told;
  alike(rank, data);
  if (rank != odd_rank) return;
  memcpy(&told, (char *)data + odd_at, sizeof told);
  told += odd_by;
  memcpy((char *)data + odd_at, &told, sizeof told);
}

static ffi_error *run_case(const struct usual *usual) {
  context("%s, case %d, number %zu and %lld", usual->operation, (int)(usual - usuals), odd_at / 8, (long long)odd_by);
  return run_usual(usual, F32, in, out, N, NULL);
}

static void prepare_others(void (*others)(int, void *)) {
  fake->reset();
  fill(in, ROOM);
  blank(out, ROOM);
  compare_on(world(PLACE, SIZE), INT64_MAX, others);
}

/* --- ranks that do the same --- */

TEST(what_is_alike_is_done) {
  FOR_COLLECTIVES (usual) {
    prepare_others(alike);
    atomic_store(&world(PLACE, SIZE)->to_compare, 0);
    SUCCEEDS(run_case(usual));
    CHECK_EQUAL(questions, 0);
    memcpy(uncompared, out, ROOM);
    prepare_others(alike);
    SUCCEEDS(run_case(usual));
    CHECK_EQUAL(questions, 1);
    CHECK_EQUAL(communications(), 1);
    CHECK_EQUAL(times_called(usual->function), 1);
    CHECK_SAME(out, uncompared, ROOM);
  }
}

/* A number for each communicator; each kind of value; what differs between ranks in any case is not told. */
TEST(what_is_told) {
  struct communicator *comm = world(2, 4), *other = world(PLACE, SIZE);
  odd_at = offsetof(struct record, count), odd_by = 1;
  odd_rank = 1;
  prepare_others(odd);
  compare_on(comm, INT64_MAX, odd);
  uint64_t before = atomic_load(&comm->compared);
  for (derivative = 0; derivative < 4; derivative++) {
    FAILS(RUN("barrier", NONE, NONE, COMM(comm)), FFI_FAILED_PRECONDITION, "");
    CHECK_EQUAL(mine.call, before + (uint64_t)derivative + 1);
    CHECK_EQUAL(mine.derivative, derivative);
    SUCCEEDS(RUN("barrier", NONE, NONE, COMM(other))); /* of which this is rank 1 */
  }
  derivative = 0;
  struct array one = ARRAY(F32, in, N), result = ARRAY(F32, out, N);
  static const char *const names[] = {"SUM", "PROD"};
  int64_t told[2];
  for (int i = 0; i < 2; i++) {
    FAILS(RUN("allreduce", one, result, COMM(comm), reduction(names[i])), FFI_FAILED_PRECONDITION, "");
    told[i] = mine.reduction;
  }
  CHECK(told[0] == reduction("SUM") && told[1] == reduction("PROD"));
  CHECK_EQUAL(mine.count, N);
  CHECK_EQUAL(mine.dtype, F32);
  FAILS(RUN("allreduce", one, result, COMM(comm), reduction_of(operation_handle("SUM"), REDUCER_USER)),
        FFI_FAILED_PRECONDITION, "");
  CHECK_EQUAL(mine.reduction, USERS_REDUCTION);
  odd_rank = 2;
}

TEST(messages_are_not_compared) {
  int64_t comm = COMM(world(PLACE, SIZE));
  static bool nothing[1];
  prepare_others(odd);
  SUCCEEDS(RUN("send", ARRAY(F32, in, N), NONE, comm, 2, 9));
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, 4 * N);
  SUCCEEDS(RUN("recv", NONE, ARRAY(F32, out, N), comm, 2, 0, 9));
  SUCCEEDS(RUN("check", ARRAY(BOOL, nothing, 1), NONE, comm, 0));
  compare_on(world(0, 1), INT64_MAX, odd);
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(world(0, 1)))); /* a rank alone */
  CHECK_EQUAL(questions, 0);
}

/* A call in chunks is compared once, with all that it passes. */
TEST(chunks_are_compared_once) {
  enum { COUNT = 5 * LEAST_CHUNK / 4 };
  static float large[COUNT], result[COUNT];
  struct communicator *comm = world(PLACE, SIZE);
  comm->chunk = LEAST_CHUNK;
  prepare_others(alike);
  SUCCEEDS(RUN("allreduce", ARRAY(F32, large, COUNT), ARRAY(F32, result, COUNT), COMM(comm), reduction("SUM")));
  CHECK_EQUAL(questions, 1);
  CHECK_EQUAL(times_called("MPI_Allreduce"), 5);
  odd_at = offsetof(struct record, count), odd_by = 1;
  prepare_others(odd);
  FAILS(RUN("allreduce", ARRAY(F32, large, COUNT), ARRAY(F32, result, COUNT), COMM(comm), reduction("SUM")),
        FFI_FAILED_PRECONDITION, "of 5120 float32", "of 5121 float32");
  CHECK_EQUAL(communications(), 0);
  comm->chunk = 0;
}

/* --- only the first calls --- */

TEST(only_the_first_calls_are_compared) {
  struct communicator *comm = world(PLACE, SIZE);
  prepare_others(alike);
  compare_on(comm, 3, alike);
  for (int i = 0; i < 5; i++) SUCCEEDS(RUN("barrier", NONE, NONE, COMM(comm)));
  CHECK_EQUAL(questions, 3);
  CHECK_EQUAL(atomic_load(&comm->to_compare), 0);
}

/* To MPI what a collective is of makes no difference. */
TEST(what_it_is_of_may_differ_then) {
  struct communicator *comm = world(PLACE, SIZE);
  int64_t first[2];
  for (int i = 0; i < 2; i++) {
    derivative = i;
    prepare_others(alike);
    compare_on(comm, 3, alike);
    comm->history = 0, atomic_store(&comm->compared, 0);
    SUCCEEDS(RUN("barrier", NONE, NONE, COMM(comm)));
    first[i] = comm->history;
  }
  CHECK_EQUAL(first[0], first[1]);
}

/* Ranks that never ask cost patience, and nothing else. */
TEST(ranks_that_do_not_ask_are_left) {
  struct communicator *comm = world(PLACE, SIZE);
  static const enum absence absences[] = {LATE_RANKS, LEFT_RANKS, STOPPED_RANKS};
  double before = compare_patience;
  compare_patience = 0.02;
  for (size_t i = 0; i < 3; i++) {
    context("absence %d", absences[i]);
    prepare_others(odd);
    compare_on(comm, 100, odd);
    absence = absences[i];
    comm->in_vain = absences[i] == LATE_RANKS ? 1 : 0; /* the second and the third in vain */
    for (int call = 0; call < 4; call++) SUCCEEDS(RUN("barrier", NONE, NONE, COMM(comm)));
    CHECK_EQUAL(communications(), 4);
    bool stops = absences[i] != LEFT_RANKS;
    CHECK_EQUAL(atomic_load(&comm->to_compare) == 0, stops);
  }
  compare_patience = before;
}

/* A difference that one call has not found is found by the next. */
TEST(what_was_missed_is_found_later) {
  struct communicator *comm = world(PLACE, SIZE);
  prepare_others(alike);
  compare_on(comm, 100, alike);
  absence = LEFT_RANKS;
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(comm)));
  int64_t with = comm->history;
  comm->history = 0;
  absence = HERE;
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(comm)));
  CHECK(comm->history != with);
}

/* --- ranks that differ --- */

TEST(any_difference_is_an_error) {
  FOR_COLLECTIVES (usual)
    for (odd_at = 0; odd_at < sizeof(struct record); odd_at += sizeof(int64_t))
      FOR_VALUES (int64_t, change, 1, -1, 1000, INT32_MAX, -(1ll << 40)) {
        char text[64] = "barrier; ";
        if (!is_usual(usual, "barrier"))
          snprintf(text, sizeof text, "%s%s of %d float32 (a value)", usual->operation, usual->compared,
                   is_usual(usual, "alltoall") ? SIZE * N : N);
        odd_by = *change;
        runtime.serialize = odd_by == 1;
        prepare_others(odd);
        FAILS(run_case(usual), FFI_FAILED_PRECONDITION, "jaxmpi.", usual->operation,
              " on rank 1 of 3: the ranks differ: this is call ", text, "; rank 2 ", "Nothing of it was sent");
        CHECK_EQUAL(communications(), 0);
        CHECK_EQUAL(questions, 1);
        CHECK_EQUAL(tellings, SIZE);
        CHECK(is_blank(out, 0, ROOM));
        if (CHECK_EQUAL(pthread_mutex_trylock(&runtime.lock), 0)) pthread_mutex_unlock(&runtime.lock);
      }
}

/* Rank 2 calls another reduction, from a line of its own. */
static void at_another_line(int rank, void *data) {
  odd(rank, data);
  if (mine.call != 0 && rank == 2) strcpy((char *)data + sizeof mine, "called at there.py:5 (g)");
}

/* Two arrays of 3 and 4 elements, which rank 2 has the other way round: what it tells has another hash. */
TEST(joined_arrays_are_compared) {
  struct array arrays[4] = {ARRAY(F32, in, 3), ARRAY(F32, in + 16, 4), ARRAY(F32, out, 3), ARRAY(F32, out + 16, 4)};
  int64_t attributes[] = {COMM(world(PLACE, SIZE)), reduction("SUM")};
  struct frame frame;
  frame_make_lists(&frame, "allreduce", arrays, 2, arrays + 2, 2, attributes);
  odd_at = offsetof(struct record, sizes), odd_by = 1;
  prepare_others(odd);
  FAILS(frame_call(&frame, "allreduce"), FFI_FAILED_PRECONDITION, "allreduce SUM of 7 float32 in 2 arrays (a value)",
        "; rank 2 calls allreduce SUM of 7 float32 in 2 arrays (a value) of other sizes");
  CHECK_EQUAL(mine.count, 7);
  CHECK_EQUAL(mine.arrays, 2);
  struct record first = mine;
  frame_make_lists(&frame, "allreduce", (struct array[]){arrays[1], arrays[0]}, 2, arrays + 2, 2, attributes);
  prepare_others(odd);
  FAILS(frame_call(&frame, "allreduce"), FFI_FAILED_PRECONDITION, "");
  CHECK(mine.sizes != first.sizes);
}

/* Two functions that call one operation differ, and each has a name of its own. */
TEST(functions_are_compared) {
  const struct usual *alltoall = usuals;
  while (!is_usual(alltoall, "alltoall")) alltoall++;
  odd_at = offsetof(struct record, operation), odd_by = ROW_alltoall - (OPERATION_COUNT + FUNCTION_migrate_counts);
  function = FUNCTION_migrate_counts;
  prepare_others(odd);
  FAILS(run_case(alltoall), FFI_FAILED_PRECONDITION, "jaxmpi, counts of migrate on rank 1 of 3: the ranks differ",
        "on this communicator: counts of migrate of ", "; rank 2 calls alltoall of ");
  FOR_VALUES (int64_t, unknown, -1, FUNCTION_COUNT, FUNCTION_redistribute) {
    function = *unknown;
    prepare_others(odd);
    FAILS(run_case(alltoall), FFI_FAILED_PRECONDITION, "jaxmpi.alltoall on rank 1 of 3: the ranks differ");
  }
}

TEST(lines_are_told) {
  int64_t attributes[] = {COMM(world(PLACE, SIZE)), 0, reduction("SUM")};
  odd_at = offsetof(struct record, count), odd_by = 1, mine.call = 0;
  CHECK(call_site_add(ROW_allreduce, attributes, F32, N, "here.py:3 (f)"));
  prepare_others(at_another_line);
  FAILS(RUN("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), attributes[0], attributes[2]), FFI_FAILED_PRECONDITION,
        "allreduce SUM of 7 float32 (a value) called at here.py:3 (f); rank 2 calls allreduce SUM of 8 float32 (a "
        "value) called at there.py:5 (g). Nothing of it was sent");
}

/* As where jax.vmap maps an array on some ranks alone. */
TEST(a_batch_on_some_ranks_is_named) {
  odd_at = offsetof(struct record, count), odd_by = N;
  prepare_others(odd);
  FAILS(RUN("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(world(PLACE, SIZE)), reduction("SUM")),
        FFI_FAILED_PRECONDITION, "sent. What jax.vmap maps on one rank must be mapped on all");
}

/* What rank 2 tells in the place of this rank's allreduce. */
static struct record other;
static void tells_other(int rank, void *data) {
  struct record told = other;
  alike(rank, data);
  told.call += mine.call;
  if (rank == 2) memcpy(data, &told, sizeof told);
}

TEST(both_are_named) {
  struct array one = ARRAY(F64, in, 3), result = ARRAY(F64, out, 3);
  struct {
    struct record record;
    const char *text;
  } others[] = {
      {{0, ROW_bcast, 1, 0, 0, F64, 3, 0, 0}, "rank 2 calls bcast from root 0 of 3 float64 (a tangent)."},
      {{0, ROW_scatter, 2, 0, 2, F32, 4, 0, 0}, "rank 2 calls scatter from root 2 of 4 float32 (a cotangent)."},
      {{0, ROW_gather, 3, 0, 1, U8, 1, 0, 0}, "gather to root 1 of 1 uint8 (a value in a further derivative)."},
      {{0, ROW_reduce, 0, reduction("MAX"), 1, F64, 3, 0, 0}, "reduce MAX to root 1 of 3 float64 (a value)."},
      {{0, ROW_scan, 0, USERS_REDUCTION, -1, F64, 3, 0, 0}, "scan by a reduction of the user's of 3 float64"},
      {{0, ROW_barrier, 0, 0, -1, -1, 0, 0, 0}, "rank 2 calls barrier."},
      {{4, ROW_barrier, 0, 0, -1, -1, 0, 0, 0}, ", barrier."},
      {{0, 99, 77, 1ll << 50, 1ll << 50, 1ll << 34, 3, 0, 0}, "rank 2 calls an unknown operation."},
  };
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    prepare_others(tells_other);
    other = others[i].record;
    FAILS(RUN("allreduce", one, result, COMM(world(PLACE, SIZE)), reduction("SUM")), FFI_FAILED_PRECONDITION,
          "on this communicator: allreduce SUM of 3 float64 (a value); rank 2 ", others[i].text,
          others[i].record.call != 0 ? "is at call " : "calls ");
  }
}

/* Half-precision sums are operations of ours. */
TEST(reductions_of_ours_are_named) {
  struct reduction *made = reduction_add(operation_handle("PROD"), REDUCER_OURS, "SUM of float16");
  odd_at = offsetof(struct record, count), odd_by = 1;
  prepare_others(odd);
  FAILS(RUN("allreduce", ARRAY(F16, in, N), ARRAY(F16, out, N), COMM(world(PLACE, SIZE)), made->number),
        FFI_FAILED_PRECONDITION, ": allreduce SUM of 7 float16 (a value); rank 2 calls allreduce SUM of 8 float16");
}
