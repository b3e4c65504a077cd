/* Arrays divided by counts of rows: what each rank sends and receives, counts that are impossible, results that are too
 * small, and counts beyond an int. */
#include <limits.h>

#include "execute/compare.h"
#include "core/failure.h"
#include "harness.h"

enum { ROOM = 2048, MOST = 4, CODE = 77 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM], expected[ROOM];

/* One call: `in_rows` and `out_rows` are those of the arrays. */
static struct {
  const char *operation;
  int rank, size, root, dtype;
  int64_t row, in_rows, out_rows;
  int32_t sent[MOST], received[MOST]; /* in most operations `sent` alone is used, the counts of all */
  size_t width;                       /* bytes of a row */
} c;

static const char *const names[] = {"allgatherv", "alltoallv", "gatherv", "reduce_scatterv", "scatterv"};
static const char *const functions[] = {"MPI_Allgatherv", "MPI_Alltoallv", "MPI_Gatherv", "MPI_Reduce_scatter",
                                        "MPI_Scatterv"};

static bool is(const char *operation) { return strcmp(c.operation, operation) == 0; }
static bool to_all(void) { return is("alltoallv"); }
static bool has_root(void) { return is("gatherv") || is("scatterv"); }
static bool reads(void) { return !is("scatterv") || c.rank == c.root; }
static bool writes(void) { return !is("gatherv") || c.rank == c.root; }

static int64_t sum(const int32_t counts[]) {
  int64_t total = 0;
  for (int r = 0; r < c.size; r++) total += counts[r];
  return total;
}

/* Rows that this rank has, and those that it gets. */
static int64_t given(void) {
  return to_all() || is("reduce_scatterv") || is("scatterv") ? sum(c.sent) : c.sent[c.rank];
}
static int64_t gotten(void) {
  return to_all() ? sum(c.received) : is("reduce_scatterv") || is("scatterv") ? c.sent[c.rank] : sum(c.sent);
}

static ffi_error *run_it(void) {
  struct array from = MATRIX(c.dtype, in, c.in_rows, c.row), to = MATRIX(c.dtype, out, c.out_rows, c.row);
  struct array arrays[3];
  int count = 0;
  if (c.out_rows * c.row == 0) to.data = in; /* XLA may put an array of no elements at the address of another one */
  if (c.in_rows * c.row == 0) from.data = to.data;
  if (reads()) arrays[count++] = from;
  arrays[count++] = ARRAY(S32, c.sent, c.size);
  if (to_all()) arrays[count++] = ARRAY(S32, c.received, c.size);
  int64_t attributes[4] = {COMM(world(c.rank, c.size))};
  int at = 1;
  if (is("reduce_scatterv")) attributes[at++] = reduction("SUM");
  if (has_root()) attributes[at++] = c.root;
  attributes[at] = c.row;
  return run_lists(c.operation, arrays, count, &to, writes(), attributes);
}

static void draw_case(size_t which) {
  const struct datatype *type = &datatype_table[draw(20)];
  c.operation = names[which];
  c.size = 1 + (int)draw(MOST);
  c.rank = (int)draw((uint32_t)c.size);
  c.root = once_in(2) ? c.rank : (int)draw((uint32_t)c.size);
  c.dtype = type->code;
  c.row = draw(4);
  c.width = (size_t)c.row * type->bytes;
  for (int r = 0; r < c.size; r++) {
    c.sent[r] = once_in(3) ? 0 : (int32_t)draw(5);
    c.received[r] = once_in(3) ? 0 : (int32_t)draw(5);
  }
  if (once_in(8)) c.sent[c.rank] = 0;
  c.received[c.rank] = c.sent[c.rank];
  c.in_rows = given() + (once_in(2) ? (int64_t)draw(3) : 0);
  c.out_rows = gotten() + (once_in(2) ? (int64_t)draw(3) : 0);
  context("%s as %d of %d, root %d, rows of %lld %s", c.operation, c.rank, c.size, c.root, (long long)c.row,
          type->name);
  fake->reset();
  fill(in, ROOM);
  blank(out, ROOM);
}

/* What the result must be, by the rules of the fake library. */
static void expect(void) {
  unsigned char *at = expected;
  const unsigned char *mine = in;
  memset(expected, 0, ROOM);
  bool parts = to_all() || is("scatterv") || is("reduce_scatterv");
  for (int r = 0; parts && r < c.rank; r++) mine += (size_t)c.sent[r] * c.width;
  if (is("reduce_scatterv")) {
    for (size_t i = 0; i < (size_t)c.sent[c.rank] * c.width; i++) expected[i] = (unsigned char)(mine[i] + c.size);
    return;
  }
  for (int r = 0; r < c.size; r++) {
    int source = is("scatterv") ? c.root : r;
    size_t bytes = (size_t)(to_all() ? c.received[r] : c.sent[r]) * c.width;
    if (is("scatterv") && r != c.rank) continue;
    for (size_t i = 0; i < bytes; i++) *at++ = source == c.rank ? mine[i] : fake_byte(source, (int64_t)i);
  }
}

TEST(parts_follow_each_other) {
  static const int64_t limits[] = {INT_MAX, 1, 3};
  for (size_t which = 0; which < sizeof names / sizeof *names; which++)
    for (int turn = 0; turn < 3000; turn++) {
      draw_state = 1 + 3000 * which + (uint64_t)turn;
      draw_case(which);
      runtime.max_count = limits[turn % 3];
      SUCCEEDS(run_it());
      runtime.max_count = INT_MAX;
      expect();
      size_t bytes = writes() ? (size_t)c.out_rows * c.width : 0;
      if (!CHECK_SAME(out, expected, bytes) || !CHECK(is_blank(out, bytes, ROOM))) return;
      bool large = turn % 3 != 0 && is("reduce_scatterv");
      if (!large && !CHECK_EQUAL(times_called(functions[which]), 1)) return;
      for (int i = 0; reads() && writes() && i < times_called(functions[which]); i++)
        if (!CHECK(called(functions[which], i)->in != called(functions[which], i)->out)) return;
    }
}

/* Draws a case of which something comes to this rank, and leaves too little room for it. False: nothing comes. */
static bool draw_without_room(size_t which, int turn) {
  draw_state = 77 + 300 * which + (uint64_t)turn;
  draw_case(which);
  if (!writes() || gotten() == 0 || c.row == 0) return false;
  c.out_rows = gotten() - 1;
  return true;
}

/* Too little room on this rank: MPI is called as on the others, and nothing is written. */
TEST(a_result_that_is_too_small_stays_as_it_was) {
  int met = 0;
  for (size_t which = 0; which < sizeof names / sizeof *names; which++)
    for (int turn = 0; turn < 300; turn++) {
      if (!draw_without_room(which, turn)) continue;
      char text[128];
      snprintf(text, sizeof text, "rows sent to this rank: %lld; its result has room for %lld", (long long)gotten(),
               (long long)c.out_rows);
      FAILS(run_it(), FFI_INVALID_ARGUMENT, text, "larger rows=");
      CHECK_EQUAL(times_called(functions[which]), 1);
      if (!CHECK(is_blank(out, 0, ROOM))) return;
      met++;
    }
  CHECK(met > 500);
}

/* Of a pytree the last array tells of the first for which there was no room, or one that cannot be communicated. */
TEST(a_pytree_of_which_one_has_no_room_is_received) {
  int met = 0;
  for (size_t which = 0; which < sizeof names / sizeof *names; which++)
    for (int turn = 0; turn < 300; turn++) {
      if (!draw_without_room(which, turn)) continue;
      int64_t row = c.row;
      char text[64];
      snprintf(text, sizeof text, "rows sent to this rank: %lld", (long long)gotten());
      leaf = LEAF_FIRST;
      SUCCEEDS(run_it());
      size_t bytes = (size_t)c.out_rows * c.width;
      CHECK(is_spoilt(out, bytes) && is_blank(out, bytes, ROOM));
      c.out_rows = gotten();
      c.row = 0, c.width = 0;
      leaf = LEAF_MIDDLE;
      bool fails = once_in(3);
      if (fails) fake->fail(functions[which], 1, 41);
      ffi_error *error = run_it();
      if (!fails) {
        SUCCEEDS(error);
        leaf = once_in(2) ? LEAF_LAST : LEAF_MIDDLE;
        if (leaf == LEAF_MIDDLE) SUCCEEDS(run_it());
        leaf = LEAF_LAST;
        c.row = row; /* the numbers of elements may differ */
        c.width = (size_t)row * datatype_find(c.dtype)->bytes;
        error = run_it();
      }
      FAILS(error, FFI_INVALID_ARGUMENT, text, "larger rows=");
      CHECK_EQUAL(atomic_load(&failures_kept), 0);
      SUCCEEDS(run_it());
      leaf = LEAF_ALONE;
      met++;
    }
  CHECK(met > 500);
}

TEST(impossible_counts_are_an_error_on_all_ranks) {
  for (size_t which = 0; which < sizeof names / sizeof *names; which++)
    for (int turn = 0; turn < 200; turn++) {
      draw_state = 5 + 200 * which + (uint64_t)turn;
      draw_case(which);
      int culprit = (int)draw((uint32_t)c.size);
      char text[80];
      for (int r = 0; is("scatterv") && r < c.size; r++) c.sent[r] = IMPOSSIBLE_COUNT;
      if (is("scatterv")) culprit = c.root;
      const int32_t told = to_all() ? -1 - turn % 3 : IMPOSSIBLE_COUNT;
      if (to_all() && culprit != c.rank) c.received[culprit] = told, c.in_rows = given();
      if (to_all() && culprit == c.rank)
        for (int r = 0; r < c.size; r++) c.sent[r] = told;
      if (to_all() && culprit == c.rank) c.received[c.rank] = told;
      if (!to_all()) c.sent[culprit] = told;
      snprintf(text, sizeof text, "rank %d%s has passed %s", culprit, culprit == c.rank ? " (this one)" : "",
               told == NO_SUCH_RANK   ? "a new owner of a row that is neither"
               : told == OTHER_ARRAYS ? "other arrays than this rank"
                                      : "a count of rows");
      if (is("reduce_scatterv")) snprintf(text, sizeof text, "a rank has passed a count of rows");
      c.out_rows = 30;
      FAILS(run_it(), FFI_INVALID_ARGUMENT, text);
      CHECK_EQUAL(times_called(functions[which]), to_all());
    }
}

TEST(errors_of_mpi_leave_nothing_behind) {
  static const char *const more[] = {"MPI_Type_contiguous", "MPI_Type_create_struct", "MPI_Type_commit", "MPI_Reduce"};
  for (size_t which = 0; which < sizeof names / sizeof *names; which++)
    for (size_t k = 0; k <= sizeof more / sizeof *more; k++)
      for (int turn = 0; turn < 60; turn++) {
        const char *function = k == 0 ? functions[which] : more[k - 1];
        draw_state = 9 + (uint64_t)turn;
        draw_case(which);
        runtime.max_count = k == 0 ? INT_MAX : 1;
        fake->fail(function, 1, CODE);
        ffi_error *error = run_it();
        runtime.max_count = INT_MAX;
        if (k == 0) FAILS(error, FFI_INTERNAL, function);
        if (k > 0 && error != NULL) error_free(error);
        CHECK_EQUAL(fake->live_types, 0);
      }
}

TEST(counts_are_compared_with_what_is_sent) {
  c.operation = "alltoallv", c.size = 3, c.rank = 1, c.dtype = F32, c.row = 1, c.width = 4;
  int32_t sent[] = {2, 1, 3};
  memcpy(c.sent, sent, sizeof sent);
  fill(in, ROOM);
  fake->alike = true; /* the other ranks say that what they get is right, as this rank does */
  compare_on(world(c.rank, c.size), INT64_MAX, NULL);
  /* The fake's rank r passes this rank's, with r - 1 added to each byte. */
  int32_t right[] = {(int32_t)0xffffff01, 1, 0x01010104};
  for (int wrong = 0; wrong < 3; wrong++) {
    memcpy(c.received, right, sizeof right);
    c.received[wrong]++;
    c.in_rows = c.out_rows = 6;
    char text[64];
    snprintf(text, sizeof text, "rank %d sends %d rows to this rank, which expects %d", wrong, (int)right[wrong],
             (int)c.received[wrong]);
    FAILS(run_it(), FFI_FAILED_PRECONDITION, "the ranks differ", text);
    CHECK_EQUAL(times_called("MPI_Alltoallv"), 0);
  }
  fake->alike = false;
}
