/* An error of MPI, injected at each call that can fail: what the user's error says, and that nothing leaks. */
#include "harness.h"

enum { N = 7, PLACE = 1, SIZE = 3, ROOM = 512, CODE = 77 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM];
static unsigned char status[64];

/* Every operation as rank 1 of 3 may call it, with the functions that it calls on the way. */
enum part { ON_ROOT, ELSEWHERE };
static const struct {
  const char *operation;
  enum part part;
  const char *function; /* that the text names */
  const char *given;    /* what the text says of the arguments */
  const char *calls[6]; /* that may fail with counts of an int */
} cases[] = {
    {"allgather", ON_ROOT, "MPI_Allgather", "; in 7 of float32; out 21 of float32", {"MPI_Allgather"}},
    {"allreduce", ON_ROOT, "MPI_Allreduce", "; in 7 of float32; out 7 of float32", {"MPI_Allreduce"}},
    {"alltoall", ON_ROOT, "MPI_Alltoall", "; in 21 of float32; out 21 of float32", {"MPI_Alltoall"}},
    {"barrier", ON_ROOT, "MPI_Barrier", "", {"MPI_Barrier"}},
    {"bcast", ON_ROOT, "MPI_Bcast", "; root 1; in 7 of float32", {"MPI_Bcast"}},
    {"bcast", ELSEWHERE, "MPI_Bcast", "; root 2; out 7 of float32", {"MPI_Bcast"}},
    {"gather", ON_ROOT, "MPI_Gather", "; root 1; in 7 of float32; out 21 of float32", {"MPI_Gather"}},
    {"gather", ELSEWHERE, "MPI_Gather", "; root 2; in 7 of float32", {"MPI_Gather"}},
    {"recv", ON_ROOT, "MPI_Recv", "; source 2; tag 9; out 7 of float32", {"MPI_Mprobe", "MPI_Mrecv"}},
    {"reduce", ON_ROOT, "MPI_Reduce", "; root 1; in 7 of float32; out 7 of float32", {"MPI_Reduce"}},
    {"reduce", ELSEWHERE, "MPI_Reduce", "; root 2; in 7 of float32", {"MPI_Reduce"}},
    {"scan", ON_ROOT, "MPI_Scan", "; in 7 of float32; out 7 of float32", {"MPI_Scan"}},
    {"scatter", ON_ROOT, "MPI_Scatter", "; root 1; in 21 of float32; out 7 of float32", {"MPI_Scatter"}},
    {"scatter", ELSEWHERE, "MPI_Scatter", "; root 2; out 7 of float32", {"MPI_Scatter"}},
    {"send", ON_ROOT, "MPI_Send", "; dest 2; tag 9; in 7 of float32", {"MPI_Send"}},
    {"sendrecv",
     ON_ROOT,
     "MPI_Sendrecv",
     "; dest 0; recvtag 9; sendtag 5; source 2; in 7 of float32; out 7 of float32",
     {"MPI_Isend", "MPI_Mprobe", "MPI_Mrecv", "MPI_Wait"}},
};
enum { CASES = sizeof cases / sizeof *cases };

static const char *name_of(size_t i) { return cases[i].operation; }
static bool is(size_t i, const char *operation) { return strcmp(name_of(i), operation) == 0; }

static ffi_error *run_case(size_t i) {
  bool mine = cases[i].part == ON_ROOT;
  int root = mine ? PLACE : 2;
  int64_t comm = COMM(world(PLACE, SIZE)), sum = reduction("SUM");
  struct array one = ARRAY(F32, in, N), all = MATRIX(F32, in, SIZE, N);
  struct array result = ARRAY(F32, out, N), results = MATRIX(F32, out, SIZE, N);
  if (is(i, "allgather")) return RUN("allgather", one, results, comm);
  if (is(i, "allreduce")) return RUN("allreduce", one, result, comm, sum);
  if (is(i, "alltoall")) return RUN("alltoall", all, results, comm);
  if (is(i, "barrier")) return RUN("barrier", NONE, NONE, comm);
  if (is(i, "bcast")) return RUN("bcast", mine ? one : NONE, mine ? NONE : result, comm, root);
  if (is(i, "gather")) return RUN("gather", one, mine ? results : NONE, comm, root);
  if (is(i, "recv")) return RUN("recv", NONE, result, comm, 2, COMM(status), 9);
  if (is(i, "reduce")) return RUN("reduce", one, mine ? result : NONE, comm, sum, root);
  if (is(i, "scan")) return RUN("scan", one, result, comm, sum);
  if (is(i, "scatter")) return RUN("scatter", mine ? all : NONE, result, comm, root);
  if (is(i, "send")) return RUN("send", one, NONE, comm, 2, 9);
  return RUN("sendrecv", one, result, comm, 0, 9, 5, 2, COMM(status));
}

/* Lets the nth call of `function` fail in case `i`. */
static void fail_in(size_t i, const char *function, int nth) {
  context("%s, case %zu, failing %s number %d", name_of(i), i, function, nth);
  fake->reset();
  fill(in, ROOM);
  blank(status, sizeof status);
  if (is(i, "recv") || is(i, "sendrecv")) fake->deliver(world(PLACE, SIZE)->handle, 2, 9, out, 4 * N);
  fake->fail(function, nth, CODE);
  bool of_type = strncmp(function, "MPI_Type", 8) == 0; /* which is made for the operation's own function */
  FAILS(run_case(i), FFI_INTERNAL, "jaxmpi.", name_of(i), " on rank 1 of 3: ", of_type ? cases[i].function : function,
        " failed: ", "the fake's text for 77", cases[i].given);
  CHECK_EQUAL(fake->live_types, 0);
  CHECK_EQUAL(fake->live_requests, 0);
  CHECK(is_blank(status, 0, sizeof status) || strcmp(function, "MPI_Wait") == 0);
}

static void each_operation_reports(void) {
  for (size_t i = 0; i < CASES; i++)
    for (int k = 0; cases[i].calls[k] != NULL; k++) {
      fail_in(i, cases[i].calls[k], 1);
      CHECK_EQUAL(fake->live_matched, 0);
      fake->reset();
      if (is(i, "recv") || is(i, "sendrecv")) fake->deliver(world(PLACE, SIZE)->handle, 2, 9, out, 4 * N);
      SUCCEEDS(run_case(i)); /* the next call works */
    }
}

/* The first, a middle and the last chunk of a reduction that is too long for one call. */
static void each_chunk_of_a_reduction_reports(void) {
  runtime.max_count = 3;
  for (size_t i = 0; i < CASES; i++) {
    if (!is(i, "allreduce") && !is(i, "reduce") && !is(i, "scan")) continue;
    for (int nth = 1; nth <= 3; nth++) {
      fail_in(i, cases[i].function, nth);
      CHECK_EQUAL(times_called(cases[i].function), nth); /* and no further chunk */
    }
  }
}

/* Making the type that spans a long vector; where one is made, it is given back. */
static void making_a_type_reports(void) {
  static const char *const makers[] = {"MPI_Type_contiguous", "MPI_Type_create_struct", "MPI_Type_commit"};
  runtime.max_count = 3;
  for (size_t i = 0; i < CASES; i++) {
    if (is(i, "allreduce") || is(i, "reduce") || is(i, "scan") || is(i, "barrier") || is(i, "recv")) continue;
    FOR_EACH (const char *const *, maker, makers) {
      fail_in(i, *maker, 1);
      CHECK_EQUAL(communications(), 0);
    }
    fake->reset();
  }
}

/* Communication that fails after a type was made. */
static void a_type_is_given_back_after_an_error(void) {
  runtime.max_count = 3;
  for (size_t i = 0; i < CASES; i++)
    for (int k = 0; cases[i].calls[k] != NULL; k++) fail_in(i, cases[i].calls[k], 1);
  fake->reset();
}

/* Refusing a message takes it off the channel, which may fail too. */
static void refusing_a_message_can_fail(void) {
  static const char *const functions[] = {"MPI_Mrecv", "MPI_Get_count"};
  FOR_EACH (const char *const *, function, functions) {
    fake->reset();
    fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, 4 * N + 4);
    fake->fail(*function, 1, CODE);
    FAILS(RUN("recv", NONE, ARRAY(F32, out, N), COMM(world(PLACE, SIZE)), 2, 0, 9), FFI_INTERNAL,
          "jaxmpi.recv on rank 1 of 3: ", *function, " failed: the fake's text for 77");
  }
  fake->reset();
}

/* What a wrong rank, root, tag or handle gives is MPI's own error. */
static void mpi_judges_the_arguments(void) {
  int64_t comm = COMM(world(PLACE, SIZE));
  FAILS(RUN("bcast", NONE, ARRAY(F32, out, N), comm, 3), FFI_INTERNAL, "MPI_Bcast failed: the fake's text for 8",
        "root 3");
  FAILS(RUN("send", ARRAY(F32, in, N), NONE, comm, 3, 0), FFI_INTERNAL, "for 6", "dest 3; tag 0");
  FAILS(RUN("send", ARRAY(F32, in, N), NONE, comm, 0, -5), FFI_INTERNAL, "for 4", "dest 0; tag -5");
  FAILS(RUN("recv", NONE, ARRAY(F32, out, N), comm, 3, 0, 0), FFI_INTERNAL, "for 6", "source 3; tag 0");
  FAILS(RUN("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), comm,
            reduction_of(operation_handle("SUM") + 50, REDUCER_USER)),
        FFI_INTERNAL, "for 10");
  FAILS(RUN("sendrecv", ARRAY(F32, in, N), ARRAY(F32, out, N), comm, 0, 0, 0, 5, 0), FFI_INTERNAL, "for 6");
  CHECK_EQUAL(times_called("MPI_Wait"), 1); /* for what was sent */
}

/* An error must not keep the lock. */
static void the_lock_is_released_after_an_error(void) {
  runtime.serialize = true;
  for (size_t i = 0; i < CASES; i++) {
    fail_in(i, cases[i].calls[0], 1);
    if (CHECK_EQUAL(pthread_mutex_trylock(&runtime.lock), 0)) pthread_mutex_unlock(&runtime.lock);
  }
  fake->reset();
}

static void a_text_longer_than_the_room_is_cut(void) {
  struct communicator *comm = world(PLACE, SIZE);
  int64_t big = INT64_MIN; /* as many characters as a number can have */
  FAILS(RUN("sendrecv", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(comm), big + 9, big, big, big, 0), FFI_INTERNAL,
        "source -9223372036854775808; in 7 of float32; out 7 of float32");
}

static void a_difference_is_an_error_that_quotes_the_text(void) {
  struct communicator *comm = world(PLACE, SIZE);
  static char text[] = "they differ, at model.py:7 (100% of loss)";
  static bool differs[N];
  int64_t number = registry_add(text, NULL);
  for (int i = -1; i < N; i++) { /* nowhere, and at each place */
    for (int k = 0; k < N; k++) differs[k] = k == i;
    if (i < 0)
      SUCCEEDS(RUN("check", ARRAY(BOOL, differs, N), NONE, COMM(comm), number));
    else
      FAILS(RUN("check", ARRAY(BOOL, differs, N), NONE, COMM(comm), number), FFI_FAILED_PRECONDITION,
            "jaxmpi, comparison by JAXMPI_CHECK on rank 1 of 3: they differ, at model.py:7 (100% of loss)");
  }
  SUCCEEDS(RUN("check", ARRAY(BOOL, NULL, 0), NONE, COMM(comm), number));
  CHECK_EQUAL(communications(), 0);
}

/* What a program of another process, or of another communicator, gives for numbers. */
static const int64_t wrong_keys[] = {0, 1, 0x7fffffffff};
static int64_t with_key(int64_t number, int64_t key) { return key << PLACE_BITS | (number & ((1 << PLACE_BITS) - 1)); }

static void check_unknown(ffi_error *error, const char *attribute) {
  FAILS(error, FFI_FAILED_PRECONDITION, attribute, "not known here: this program was compiled in another process",
        "compile it again here. Nothing was sent");
  CHECK_EQUAL(fake->call_count, 0);
}

static void an_object_of_another_process_is_refused(void) {
  static char text[] = "they differ, at model.py:7 (100% of loss)";
  static bool differs[1] = {true};
  int64_t comm = COMM(world(PLACE, SIZE)), sum = reduction("SUM"), state = COMM(status), line = COMM(text);
  struct array one = ARRAY(F32, in, N), result = ARRAY(F32, out, N);
  fake->reset();
  FOR_EACH (const int64_t *, key, wrong_keys) {
    context("key %d", (int)(key - wrong_keys));
    check_unknown(RUN("allreduce", one, result, with_key(comm, *key), sum), "jaxmpi.allreduce: its comm is");
    check_unknown(RUN("allreduce", one, result, comm, with_key(sum, *key)), "on rank 1 of 3: its op is");
    check_unknown(RUN("reduce", one, result, comm, with_key(sum, *key), PLACE), "its op is");
    check_unknown(RUN("scan", one, result, comm, with_key(sum, *key)), "its op is");
    check_unknown(RUN("recv", NONE, result, comm, 2, with_key(state, *key), 9), "its status is");
    check_unknown(RUN("sendrecv", one, result, comm, 2, 9, 9, 2, with_key(state, *key)), "its status is");
    check_unknown(RUN("check", ARRAY(BOOL, differs, 1), NONE, comm, with_key(line, *key)), "its text is");
  }
}

static void an_unknown_number_is_refused(void) {
  static const int64_t places[] = {0, 1000, 1024, 1 << 20, (1 << PLACE_BITS) - 1};
  int64_t comm = COMM(world(PLACE, SIZE));
  struct array one = ARRAY(F32, in, N), result = ARRAY(F32, out, N);
  fake->reset();
  FOR_EACH (const int64_t *, place, places) {
    int64_t number = (comm >> PLACE_BITS) << PLACE_BITS | *place;
    check_unknown(RUN("barrier", NONE, NONE, number), "its comm is");
    check_unknown(RUN("allreduce", one, result, comm, number), "its op is");
    check_unknown(RUN("recv", NONE, result, comm, 2, number, 9), "its status is");
  }
  check_unknown(RUN("allreduce", one, result, comm, 0), "its op is");
  check_unknown(RUN("barrier", NONE, NONE, -1), "its comm is");
  check_unknown(RUN("barrier", NONE, NONE, INT64_MIN | comm), "its comm is");
  check_unknown(RUN("allreduce", one, result, comm, (intptr_t)operation_handle("SUM")), "its op is"); /* as it was */
}

/* What means the same in each run has the same number, whatever was added before the object itself. */
static void a_meaning_is_a_number(void) {
  static char first, second, third;
  int64_t kept = registry_reserve("the first"), number = registry_add(&second, NULL);
  CHECK(registry_at(kept) == NULL && registry_at(number) == &second);
  CHECK_EQUAL(registry_add(&first, "the first"), kept);
  CHECK(registry_at(kept) == &first);
  int64_t other = registry_add(&third, "the third");
  CHECK(registry_at(other) == &third);
  CHECK_EQUAL(other & ((1 << PLACE_BITS) - 1), (number & ((1 << PLACE_BITS) - 1)) + 1);
  CHECK(kept > 0 && number > 0 && other > 0);
  CHECK(kept >> PLACE_BITS != other >> PLACE_BITS && kept >> PLACE_BITS != number >> PLACE_BITS);
  CHECK_EQUAL(kept >> PLACE_BITS, 0x22f0ededf1); /* in each run, for ever */
}

static char told[256];
static void note_reason(const char *reason) { snprintf(told, sizeof told, "%s", reason); }

/* JAXMPI_ON_ERROR=abort: the job ends with the text of the error as its reason. */
static void an_error_ends_the_job(void) {
  static const char start[] = "jaxmpi.barrier on rank 1 of 3: MPI_Barrier failed";
  void (*before)(const char *) = runtime.abort;
  runtime.abort = note_reason;
  atomic_store(&runtime.ends_on_error, true);
  fake->fail("MPI_Barrier", 1, CODE);
  FAILS(RUN("barrier", NONE, NONE, COMM(world(PLACE, SIZE))), FFI_INTERNAL, start);
  atomic_store(&runtime.ends_on_error, false);
  runtime.abort = before;
  CHECK(strncmp(told, start, strlen(start)) == 0);
}

static int revoked_at;
static void note_revoked(const struct communicator *comm) { revoked_at = comm->rank + 1; }
static bool yes(const struct communicator *comm) { return comm != NULL; }
static bool no(const struct communicator *comm) { return comm == NULL; }

/* One of MPI's classes for a process that has died, or any other error once one is known to have: the communicator is
 * revoked, and the text names it. */
static void a_process_has_failed(void) {
  struct abi other = *abi;
  other.revoke = note_revoked, other.is_broken = no;
  runtime.abi = &other;
  runtime.failed = CODE, runtime.pending = CODE + 1, runtime.revoked = CODE + 2;
  char of_comm[96];
  struct communicator *comm = world(PLACE, SIZE);
  snprintf(of_comm, sizeof of_comm, "; root 2; out 7 of float32 [a process has failed, communicator %d]",
           (int)(comm->number & ((1 << PLACE_BITS) - 1)));
  for (int code = CODE; code < CODE + 5; code++) {
    bool tells = code < CODE + 3 || code == CODE + 4;
    context("code %d", code);
    if (code == CODE + 4) other.is_broken = yes;
    revoked_at = 0;
    fake->fail("MPI_Bcast", 1, code);
    FAILS(RUN("bcast", NONE, ARRAY(F32, out, N), COMM(comm), 2), tells ? FFI_UNAVAILABLE : FFI_INTERNAL,
          "MPI_Bcast failed: ", tells ? of_comm : "; root 2; out 7 of float32");
    CHECK_EQUAL(revoked_at, tells ? PLACE + 1 : 0);
    fake->reset();
  }
  runtime.failed = runtime.pending = runtime.revoked = 0;
  runtime.abi = abi;
}

/* A collective that returns without an error, though this rank knows of a death, may not have written its result. What
 * a message has brought is what was sent. */
static void a_result_is_confirmed(void) {
  struct abi other = *abi;
  struct communicator *comm = world(PLACE, SIZE);
  other.revoke = note_revoked, other.is_broken = no;
  runtime.abi = &other;
  for (int known = 0; known < 4; known++) {
    bool fails = known == 3;
    context("known %d", known);
    runtime.failed = known & 1 ? CODE : 0;
    other.is_broken = known & 2 ? yes : no;
    revoked_at = 0;
    ffi_error *error = RUN("bcast", NONE, ARRAY(F32, out, N), COMM(comm), 2);
    if (fails)
      FAILS(error, FFI_UNAVAILABLE, "MPI_Bcast returned without an error, and may not have written all of its result",
            "[a process has failed, communicator ");
    else
      SUCCEEDS(error);
    CHECK_EQUAL(revoked_at, fails ? PLACE + 1 : 0);
    float request[2];
    SUCCEEDS(RUN("iallreduce", ARRAY(F32, in, N), ARRAY(F32, request, 2), COMM(comm), reduction("SUM")));
    error = RUN("wait", ARRAY(F32, request, 2), ARRAY(F32, out, N), COMM(comm), 0);
    if (fails)
      FAILS(error, FFI_UNAVAILABLE, "jaxmpi.iallreduce on rank", "[a process has failed, communicator ");
    else
      SUCCEEDS(error);
    SUCCEEDS(RUN("send", ARRAY(F32, in, N), NONE, COMM(comm), 2, 5));
  }
  runtime.failed = 0;
  runtime.abi = abi;
}

static const struct test tests[] = {
    TEST(a_process_has_failed),
    TEST(a_result_is_confirmed),
    TEST(an_object_of_another_process_is_refused),
    TEST(an_unknown_number_is_refused),
    TEST(a_meaning_is_a_number),
    TEST(a_difference_is_an_error_that_quotes_the_text),
    TEST(each_operation_reports),
    TEST(each_chunk_of_a_reduction_reports),
    TEST(making_a_type_reports),
    TEST(a_type_is_given_back_after_an_error),
    TEST(refusing_a_message_can_fail),
    TEST(mpi_judges_the_arguments),
    TEST(the_lock_is_released_after_an_error),
    TEST(an_error_ends_the_job),
    TEST(a_text_longer_than_the_room_is_cut),
};

MAIN(tests)
