/* JAXMPI_CHECK: what a rank tells the others before a collective, and that a difference stops all of them. */
#include "execute/agreement.h"
#include "execute/compare.h"
#include "observe/watchdog.h"

#include "harness.h"

enum { N = 7, PLACE = 1, SIZE = 3, ROOM = 512 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM], usual[ROOM];

/* Every collective as rank 1 of 3 may call it, and how it is described. */
static const struct {
  const char *operation;
  bool root; /* this rank is, where there is one; otherwise rank 2 */
  const char *function, *text;
} cases[] = {
    {"allgather", true, "MPI_Allgather", "allgather of 7 float32 (a value)"},
    {"allreduce", true, "MPI_Allreduce", "allreduce SUM of 7 float32 (a value)"},
    {"alltoall", true, "MPI_Alltoall", "alltoall of 21 float32 (a value)"},
    {"barrier", true, "MPI_Barrier", "barrier; "},
    {"bcast", true, "MPI_Bcast", "bcast from root 1 of 7 float32 (a value)"},
    {"bcast", false, "MPI_Bcast", "bcast from root 2 of 7 float32 (a value)"},
    {"gather", true, "MPI_Gather", "gather to root 1 of 7 float32 (a value)"},
    {"gather", false, "MPI_Gather", "gather to root 2 of 7 float32 (a value)"},
    {"reduce", true, "MPI_Reduce", "reduce SUM to root 1 of 7 float32 (a value)"},
    {"reduce", false, "MPI_Reduce", "reduce SUM to root 2 of 7 float32 (a value)"},
    {"scan", true, "MPI_Scan", "scan SUM of 7 float32 (a value)"},
    {"scatter", true, "MPI_Scatter", "scatter from root 1 of 7 float32 (a value)"},
    {"scatter", false, "MPI_Scatter", "scatter from root 2 of 7 float32 (a value)"},
};
enum { CASES = sizeof cases / sizeof *cases };

static bool is(size_t i, const char *operation) { return strcmp(cases[i].operation, operation) == 0; }

static ffi_error *run_case(size_t i) {
  const char *operation = cases[i].operation;
  int root = cases[i].root ? PLACE : 2;
  int64_t comm = COMM(world(PLACE, SIZE)), sum = reduction("SUM");
  struct array one = ARRAY(F32, in, N), all = MATRIX(F32, in, SIZE, N);
  struct array result = ARRAY(F32, out, N), results = MATRIX(F32, out, SIZE, N);
  if (is(i, "allgather")) return RUN(operation, one, results, comm);
  if (is(i, "alltoall")) return RUN(operation, all, results, comm);
  if (is(i, "barrier")) return RUN(operation, NONE, NONE, comm);
  if (is(i, "bcast")) return RUN(operation, cases[i].root ? one : NONE, cases[i].root ? NONE : result, comm, root);
  if (is(i, "gather")) return RUN(operation, one, cases[i].root ? results : NONE, comm, root);
  if (is(i, "reduce")) return RUN(operation, one, cases[i].root ? result : NONE, comm, sum, root);
  if (is(i, "scatter")) return RUN(operation, cases[i].root ? all : NONE, result, comm, root);
  return RUN(operation, one, result, comm, sum);
}

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

static void prepare(void (*others)(int, void *)) {
  fake->reset();
  fill(in, ROOM);
  blank(out, ROOM);
  compare_on(world(PLACE, SIZE), INT64_MAX, others);
}

/* --- ranks that do the same --- */

static void what_is_alike_is_done(void) {
  for (size_t i = 0; i < CASES; i++) {
    context("%s, case %zu", cases[i].operation, i);
    prepare(alike);
    atomic_store(&world(PLACE, SIZE)->to_compare, 0);
    SUCCEEDS(run_case(i));
    CHECK_EQUAL(questions, 0);
    memcpy(usual, out, ROOM);
    prepare(alike);
    SUCCEEDS(run_case(i));
    CHECK_EQUAL(questions, 1);
    CHECK_EQUAL(communications(), 1);
    CHECK_EQUAL(times_called(cases[i].function), 1);
    CHECK_SAME(out, usual, ROOM);
  }
}

/* A number for each communicator; each kind of value; what differs between ranks in any case is not told. */
static void what_is_told(void) {
  struct communicator *comm = world(2, 4), *other = world(PLACE, SIZE);
  odd_at = offsetof(struct record, count), odd_by = 1;
  odd_rank = 1;
  prepare(odd);
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

static void messages_are_not_compared(void) {
  int64_t comm = COMM(world(PLACE, SIZE));
  static bool nothing[1];
  prepare(odd);
  SUCCEEDS(RUN("send", ARRAY(F32, in, N), NONE, comm, 2, 9));
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, 4 * N);
  SUCCEEDS(RUN("recv", NONE, ARRAY(F32, out, N), comm, 2, 0, 9));
  SUCCEEDS(RUN("check", ARRAY(BOOL, nothing, 1), NONE, comm, 0));
  compare_on(world(0, 1), INT64_MAX, odd);
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(world(0, 1)))); /* a rank alone */
  CHECK_EQUAL(questions, 0);
}

/* A call in chunks is compared once, with all that it passes. */
static void chunks_are_compared_once(void) {
  enum { COUNT = 5 * LEAST_CHUNK / 4 };
  static float large[COUNT], result[COUNT];
  struct communicator *comm = world(PLACE, SIZE);
  comm->chunk = LEAST_CHUNK;
  prepare(alike);
  SUCCEEDS(RUN("allreduce", ARRAY(F32, large, COUNT), ARRAY(F32, result, COUNT), COMM(comm), reduction("SUM")));
  CHECK_EQUAL(questions, 1);
  CHECK_EQUAL(times_called("MPI_Allreduce"), 5);
  odd_at = offsetof(struct record, count), odd_by = 1;
  prepare(odd);
  FAILS(RUN("allreduce", ARRAY(F32, large, COUNT), ARRAY(F32, result, COUNT), COMM(comm), reduction("SUM")),
        FFI_FAILED_PRECONDITION, "of 5120 float32", "of 5121 float32");
  CHECK_EQUAL(communications(), 0);
  comm->chunk = 0;
}

/* --- only the first calls --- */

static void only_the_first_calls_are_compared(void) {
  struct communicator *comm = world(PLACE, SIZE);
  prepare(alike);
  compare_on(comm, 3, alike);
  for (int i = 0; i < 5; i++) SUCCEEDS(RUN("barrier", NONE, NONE, COMM(comm)));
  CHECK_EQUAL(questions, 3);
  CHECK_EQUAL(atomic_load(&comm->to_compare), 0);
}

/* To MPI what a collective is of makes no difference. */
static void what_it_is_of_may_differ_then(void) {
  struct communicator *comm = world(PLACE, SIZE);
  int64_t first[2];
  for (int i = 0; i < 2; i++) {
    derivative = i;
    prepare(alike);
    compare_on(comm, 3, alike);
    comm->history = 0, atomic_store(&comm->compared, 0);
    SUCCEEDS(RUN("barrier", NONE, NONE, COMM(comm)));
    first[i] = comm->history;
  }
  CHECK_EQUAL(first[0], first[1]);
}

/* Ranks that never ask cost patience, and nothing else. */
static void ranks_that_do_not_ask_are_left(void) {
  struct communicator *comm = world(PLACE, SIZE);
  static const enum absence absences[] = {LATE_RANKS, LEFT_RANKS, STOPPED_RANKS};
  double before = compare_patience;
  compare_patience = 0.02;
  for (size_t i = 0; i < 3; i++) {
    context("absence %d", absences[i]);
    prepare(odd);
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
static void what_was_missed_is_found_later(void) {
  struct communicator *comm = world(PLACE, SIZE);
  prepare(alike);
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

static void any_difference_is_an_error(void) {
  static const int64_t by[] = {1, -1, 1000, INT32_MAX, -(1ll << 40)};
  for (size_t i = 0; i < CASES; i++)
    for (odd_at = 0; odd_at < sizeof(struct record); odd_at += sizeof(int64_t))
      FOR_EACH (const int64_t *, change, by) {
        context("%s, case %zu, number %zu and %lld", cases[i].operation, i, odd_at / 8, (long long)*change);
        odd_by = *change;
        prepare(odd);
        FAILS(run_case(i), FFI_FAILED_PRECONDITION, "jaxmpi.", cases[i].operation,
              " on rank 1 of 3: the ranks differ: this is call ", cases[i].text, "; rank 2 ", "Nothing of it was sent");
        CHECK_EQUAL(communications(), 0);
        CHECK_EQUAL(questions, 1);
        CHECK_EQUAL(tellings, SIZE);
        CHECK(is_blank(out, 0, ROOM));
      }
}

/* Rank 2 calls another reduction, from a line of its own. */
static void at_another_line(int rank, void *data) {
  odd(rank, data);
  if (mine.call != 0 && rank == 2) strcpy((char *)data + sizeof mine, "called at there.py:5 (g)");
}

/* Two arrays of 3 and 4 elements, which rank 2 has the other way round: what it tells has another hash. */
static void joined_arrays_are_compared(void) {
  struct array arrays[4] = {ARRAY(F32, in, 3), ARRAY(F32, in + 16, 4), ARRAY(F32, out, 3), ARRAY(F32, out + 16, 4)};
  int64_t attributes[] = {COMM(world(PLACE, SIZE)), reduction("SUM")};
  struct frame frame;
  frame_make_lists(&frame, "allreduce", arrays, 2, arrays + 2, 2, attributes);
  odd_at = offsetof(struct record, sizes), odd_by = 1;
  prepare(odd);
  FAILS(frame_call(&frame, "allreduce"), FFI_FAILED_PRECONDITION, "allreduce SUM of 7 float32 in 2 arrays (a value)",
        "; rank 2 calls allreduce SUM of 7 float32 in 2 arrays (a value) of other sizes");
  CHECK_EQUAL(mine.count, 7);
  CHECK_EQUAL(mine.arrays, 2);
  struct record first = mine;
  frame_make_lists(&frame, "allreduce", (struct array[]){arrays[1], arrays[0]}, 2, arrays + 2, 2, attributes);
  prepare(odd);
  FAILS(frame_call(&frame, "allreduce"), FFI_FAILED_PRECONDITION, "");
  CHECK(mine.sizes != first.sizes);
}

static void lines_are_told(void) {
  int64_t attributes[] = {COMM(world(PLACE, SIZE)), 0, reduction("SUM")};
  odd_at = offsetof(struct record, count), odd_by = 1, mine.call = 0;
  CHECK(call_site_add(ROW_allreduce, attributes, F32, N, "here.py:3 (f)"));
  prepare(at_another_line);
  FAILS(RUN("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), attributes[0], attributes[2]), FFI_FAILED_PRECONDITION,
        "allreduce SUM of 7 float32 (a value) called at here.py:3 (f); rank 2 calls allreduce SUM of 8 float32 (a "
        "value) called at there.py:5 (g). Nothing of it was sent");
}

/* As where jax.vmap maps an array on some ranks alone. */
static void a_batch_on_some_ranks_is_named(void) {
  odd_at = offsetof(struct record, count), odd_by = N;
  prepare(odd);
  FAILS(RUN("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(world(PLACE, SIZE)), reduction("SUM")),
        FFI_FAILED_PRECONDITION, "sent. What jax.vmap maps on one rank must be mapped on all");
}

static int64_t row_of(const char *operation) {
  int64_t row = 0;
  while (strcmp(operation_table[row].id, operation) != 0) row++;
  return row;
}

/* What rank 2 tells in the place of this rank's allreduce. */
static struct record other;
static void tells_other(int rank, void *data) {
  struct record told = other;
  alike(rank, data);
  told.call += mine.call;
  if (rank == 2) memcpy(data, &told, sizeof told);
}

static void both_are_named(void) {
  struct array one = ARRAY(F64, in, 3), result = ARRAY(F64, out, 3);
  struct {
    struct record record;
    const char *text;
  } others[] = {
      {{0, row_of("bcast"), 1, 0, 0, F64, 3, 0, 0}, "rank 2 calls bcast from root 0 of 3 float64 (a tangent)."},
      {{0, row_of("scatter"), 2, 0, 2, F32, 4, 0, 0}, "rank 2 calls scatter from root 2 of 4 float32 (a cotangent)."},
      {{0, row_of("gather"), 3, 0, 1, U8, 1, 0, 0}, "gather to root 1 of 1 uint8 (a value in a further derivative)."},
      {{0, row_of("reduce"), 0, reduction("MAX"), 1, F64, 3, 0, 0}, "reduce MAX to root 1 of 3 float64 (a value)."},
      {{0, row_of("scan"), 0, USERS_REDUCTION, -1, F64, 3, 0, 0}, "scan by a reduction of the user's of 3 float64"},
      {{0, row_of("barrier"), 0, 0, -1, -1, 0, 0, 0}, "rank 2 calls barrier."},
      {{4, row_of("barrier"), 0, 0, -1, -1, 0, 0, 0}, ", barrier."},
      {{0, 99, 77, 1ll << 50, 1ll << 50, 1ll << 34, 3, 0, 0}, "rank 2 calls an unknown operation."},
  };
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    prepare(tells_other);
    other = others[i].record;
    FAILS(RUN("allreduce", one, result, COMM(world(PLACE, SIZE)), reduction("SUM")), FFI_FAILED_PRECONDITION,
          "on this communicator: allreduce SUM of 3 float64 (a value); rank 2 ", others[i].text,
          others[i].record.call != 0 ? "is at call " : "calls ");
  }
}

/* Half-precision sums are operations of ours. */
static void reductions_of_ours_are_named(void) {
  struct reduction *made = reduction_add(operation_handle("PROD"), REDUCER_OURS, "SUM of float16");
  odd_at = offsetof(struct record, count), odd_by = 1;
  prepare(odd);
  FAILS(RUN("allreduce", ARRAY(F16, in, N), ARRAY(F16, out, N), COMM(world(PLACE, SIZE)), made->number),
        FFI_FAILED_PRECONDITION, ": allreduce SUM of 7 float16 (a value); rank 2 calls allreduce SUM of 8 float16");
}

static void locks_are_given_back(void) {
  runtime.serialize = true;
  odd_at = 0, odd_by = 1;
  for (size_t i = 0; i < CASES; i++) {
    context("%s, case %zu", cases[i].operation, i);
    prepare(odd);
    FAILS(run_case(i), FFI_FAILED_PRECONDITION, "the ranks differ");
    if (CHECK_EQUAL(pthread_mutex_trylock(&runtime.lock), 0)) pthread_mutex_unlock(&runtime.lock);
  }
}

static const struct test tests[] = {
    TEST(what_is_alike_is_done),
    TEST(what_is_told),
    TEST(messages_are_not_compared),
    TEST(chunks_are_compared_once),
    TEST(only_the_first_calls_are_compared),
    TEST(what_it_is_of_may_differ_then),
    TEST(ranks_that_do_not_ask_are_left),
    TEST(what_was_missed_is_found_later),
    TEST(any_difference_is_an_error),
    TEST(lines_are_told),
    TEST(a_batch_on_some_ranks_is_named),
    TEST(joined_arrays_are_compared),
    TEST(both_are_named),
    TEST(reductions_of_ours_are_named),
    TEST(locks_are_given_back),
};

MAIN(tests)
