/* An error of MPI, injected at each call that can fail: what the user's error says, and that nothing leaks. */
#include "harness.h"

enum { N = 7, PLACE = 1, SIZE = 3, ROOM = 512, CODE = 77 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM];
static unsigned char status[64];

/* The functions of MPI on the way that may fail with counts of an int. */
static const char *const *calls_of(const struct usual *usual) {
  static const char *one[2] = {NULL, NULL};
  static const char *const receiving[] = {"MPI_Mprobe", "MPI_Mrecv", NULL};
  static const char *const both[] = {"MPI_Isend", "MPI_Mprobe", "MPI_Mrecv", "MPI_Wait", NULL};
  one[0] = usual->function;
  return is_usual(usual, "recv") ? receiving : is_usual(usual, "sendrecv") ? both : one;
}

static ffi_error *run_case(const struct usual *usual) { return run_usual(usual, F32, in, out, N, status); }

static void prepare_case(const struct usual *usual) {
  fake->reset();
  fill(in, ROOM);
  blank(status, sizeof status);
  if (strstr(usual->operation, "recv") != NULL) fake->deliver(world(PLACE, SIZE)->handle, 2, 9, out, 4 * N);
}

/* Lets the nth call of `function` fail. */
static void fail_in(const struct usual *usual, const char *function, int nth) {
  context("%s, case %d, failing %s number %d", usual->operation, (int)(usual - usuals), function, nth);
  prepare_case(usual);
  fake->fail(function, nth, CODE);
  const char *told = strncmp(function, "MPI_Type", 8) != 0 ? function
                     : is_usual(usual, "sendrecv")         ? "MPI_Sendrecv"
                                                           : usual->function; /* for which the type is made */
  char given[128], part[2][32] = {"", ""};
  if (usual->in > 0) snprintf(part[0], sizeof part[0], "; in %d of float32", N * usual->in);
  if (usual->out > 0) snprintf(part[1], sizeof part[1], "; out %d of float32", N * usual->out);
  snprintf(given, sizeof given, "%s%s%s", usual->given, part[0], part[1]);
  FAILS(run_case(usual), FFI_INTERNAL, "jaxmpi.", usual->operation, " on rank 1 of 3: ", told,
        " failed: ", "the fake's text for 77", given);
  CHECK_EQUAL(fake->live_types + fake->live_requests, 0);
  CHECK(is_blank(status, 0, sizeof status) || strcmp(function, "MPI_Wait") == 0);
}

TEST(each_operation_reports) {
  FOR_EACH (const struct usual *, usual, usuals)
    for (const char *const *function = calls_of(usual); *function != NULL; function++) {
      runtime.max_count = INT32_MAX;
      fail_in(usual, *function, 1);
      CHECK_EQUAL(fake->live_matched, 0);
      prepare_case(usual);
      SUCCEEDS(run_case(usual)); /* the next call works */
      runtime.max_count = 3;     /* also with a type, which is given back */
      fail_in(usual, *function, 1);
    }
}

/* The first, a middle and the last chunk of a reduction that is too long for one call. */
TEST(each_chunk_of_a_reduction_reports) {
  runtime.max_count = 3;
  FOR_EACH (const struct usual *, usual, usuals)
    for (int nth = 1; nth <= 3 && reduces(usual); nth++) {
      fail_in(usual, usual->function, nth);
      CHECK_EQUAL(times_called(usual->function), nth); /* and no further chunk */
    }
}

/* Making the type that spans a long vector; where one is made, it is given back. */
TEST(making_a_type_reports) {
  runtime.max_count = 3;
  FOR_EACH (const struct usual *, usual, usuals) {
    if (reduces(usual) || is_usual(usual, "barrier") || is_usual(usual, "recv")) continue;
    FOR_VALUES (string, maker, "MPI_Type_contiguous", "MPI_Type_create_struct", "MPI_Type_commit") {
      fail_in(usual, *maker, 1);
      CHECK_EQUAL(communications(), 0);
    }
  }
  fake->reset();
}

/* Refusing a message takes it off the channel, which may fail too. */
TEST(refusing_a_message_can_fail) {
  FOR_VALUES (string, function, "MPI_Mrecv", "MPI_Get_count") {
    fake->reset();
    fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, 4 * N + 4);
    fake->fail(*function, 1, CODE);
    FAILS(RUN("recv", NONE, ARRAY(F32, out, N), COMM(world(PLACE, SIZE)), 2, 0, 9), FFI_INTERNAL,
          "jaxmpi.recv on rank 1 of 3: ", *function, " failed: the fake's text for 77");
  }
  fake->reset();
}

/* What a wrong rank, root, tag or handle gives is MPI's own error. */
TEST(mpi_judges_the_arguments) {
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

TEST(a_text_longer_than_the_room_is_cut) {
  struct communicator *comm = world(PLACE, SIZE);
  int64_t big = INT64_MIN; /* as many characters as a number can have */
  FAILS(RUN("sendrecv", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(comm), big + 9, big, big, big, 0), FFI_INTERNAL,
        "source -9223372036854775808; in 7 of float32; out 7 of float32");
}

TEST(a_difference_is_an_error_that_quotes_the_text) {
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

TEST(an_object_of_another_process_is_refused) {
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

TEST(an_unknown_number_is_refused) {
  int64_t comm = COMM(world(PLACE, SIZE)), first = comm >> PLACE_BITS << PLACE_BITS;
  struct array one = ARRAY(F32, in, N), result = ARRAY(F32, out, N);
  fake->reset();
  FOR_VALUES (int64_t, number, first, first + 1000, first + 1024, first + (1 << 20), first + (1 << PLACE_BITS) - 1, -1,
              INT64_MIN | comm, (intptr_t)operation_handle("SUM")) { /* as it was */
    check_unknown(RUN("barrier", NONE, NONE, *number), "its comm is");
    check_unknown(RUN("allreduce", one, result, comm, *number), "its op is");
    check_unknown(RUN("recv", NONE, result, comm, 2, *number, 9), "its status is");
  }
  check_unknown(RUN("allreduce", one, result, comm, 0), "its op is");
}

/* What means the same in each run has the same number, whatever was added before the object itself. */
TEST(a_meaning_is_a_number) {
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
TEST(an_error_ends_the_job) {
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
TEST(a_process_has_failed) {
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
TEST(a_result_is_confirmed) {
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
    FAILS_IF(fails, error, FFI_UNAVAILABLE,
             "MPI_Bcast returned without an error, and may not have written all of its result",
             "[a process has failed, communicator ");
    CHECK_EQUAL(revoked_at, fails ? PLACE + 1 : 0);
    float request[2];
    SUCCEEDS(RUN("iallreduce", ARRAY(F32, in, N), ARRAY(F32, request, 2), COMM(comm), reduction("SUM")));
    error = RUN("wait", ARRAY(F32, request, 2), ARRAY(F32, out, N), COMM(comm), 0);
    FAILS_IF(fails, error, FFI_UNAVAILABLE, "jaxmpi.iallreduce on rank", "[a process has failed, communicator ");
    SUCCEEDS(RUN("send", ARRAY(F32, in, N), NONE, COMM(comm), 2, 5));
  }
  runtime.failed = 0;
  runtime.abi = abi;
}
