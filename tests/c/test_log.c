/* The debug log, and the lock for a library that allows one call at a time. */
#include "harness.h"

enum { PLACE = 1, SIZE = 3, N = 5 };
static float in[SIZE * N], out[SIZE * N];

/* --- the log --- */

/* Whether the log is two lines: `r7 | ` and the pattern, a token; and an end with the same token. */
static bool log_is(const char *begins, const char *function, const char *end) {
  char pattern[512];
  regmatch_t match[3];
  snprintf(pattern, sizeof pattern,
           "^r7 [|] %s and token ([0-9a-f]{12})\nr7 [|] %s %s after [0-9][.][0-9][0-9]e[-+][0-9][0-9] s, "
           "token ([0-9a-f]{12})\n$",
           begins, function, end);
  return is_like(caught, pattern, 0, match) && strncmp(caught + match[1].rm_so, caught + match[2].rm_so, 12) == 0;
}

/* The call succeeds, and logs its function of MPI, which is followed by `what`. */
static void run_logged(const char *function, const char *what, const char *operation, struct array a, struct array b,
                       const int64_t attributes[]) {
  char begins[128];
  snprintf(begins, sizeof begins, "%s%s", function, what);
  runtime.rank = 7; /* in COMM_WORLD, not in the communicator */
  atomic_store(&runtime.log, true);
  catch_stderr();
  ffi_error *error = run(operation, a, b, attributes);
  release_stderr();
  atomic_store(&runtime.log, false);
  SUCCEEDS(error);
  CHECK(log_is(begins, function, "done"));
}
#define LOGGED(function, what, operation, a, b, ...) \
  run_logged(function, what, operation, a, b, (const int64_t[]){__VA_ARGS__})

TEST(collectives_are_logged) {
  int64_t comm = COMM(world(PLACE, SIZE)), sum = reduction("SUM");
  struct array one = ARRAY(F32, in, N), all = MATRIX(F32, in, SIZE, N);
  struct array result = ARRAY(F32, out, N), results = MATRIX(F32, out, SIZE, N);
  LOGGED("MPI_Allgather", " with 5 items", "allgather", one, results, comm);
  LOGGED("MPI_Allreduce", " with 5 items", "allreduce", one, result, comm, sum);
  LOGGED("MPI_Alltoall", " with 15 items", "alltoall", all, results, comm);
  LOGGED("MPI_Bcast", " from 1 with 5 items", "bcast", one, NONE, comm, PLACE);
  LOGGED("MPI_Bcast", " from 2 with 5 items", "bcast", NONE, result, comm, 2);
  LOGGED("MPI_Gather", " -> 2 with 5 items", "gather", one, NONE, comm, 2);
  LOGGED("MPI_Reduce", " -> 2 with 5 items", "reduce", one, NONE, comm, sum, 2);
  LOGGED("MPI_Scan", " with 5 items", "scan", one, result, comm, sum);
  LOGGED("MPI_Scatter", " from 2 with 5 items", "scatter", NONE, result, comm, 2);
}

TEST(what_calls_no_function_is_not_logged) {
  bool flags[] = {false, false};
  atomic_store(&runtime.log, true);
  catch_stderr();
  ffi_error *error = RUN("check", ARRAY(BOOL, flags, 2), NONE, COMM(world(PLACE, SIZE)), 0);
  release_stderr();
  atomic_store(&runtime.log, false);
  SUCCEEDS(error);
  CHECK_EQUAL(caught[0], '\0');
}

TEST(messages_are_logged) {
  int64_t comm = COMM(world(PLACE, SIZE));
  struct array sent = ARRAY(F32, in, N), result = ARRAY(F32, out, N);
  LOGGED("MPI_Send", " -> 2 with tag 9", "send", sent, NONE, comm, 2, 9);
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, sizeof(float) * N);
  LOGGED("MPI_Recv", " <- 2 with tag 9", "recv", NONE, result, comm, 2, 0, 9);
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, sizeof(float) * N);
  LOGGED("MPI_Sendrecv", " <- 2 with tag 9 -> 0 with tag 5", "sendrecv", sent, result, comm, 0, 9, 5, 2, 0);
}

/* The form of the line to the letter, and that tokens count up. */
TEST(a_line_has_this_form) {
  runtime.rank = 0;
  atomic_store(&runtime.calls, 0x123456789aull);
  atomic_store(&runtime.log, true);
  catch_stderr();
  ffi_error *first = RUN("send", ARRAY(F32, in, N), NONE, COMM(world(0, 2)), 1, 0);
  ffi_error *second = RUN("barrier", NONE, NONE, COMM(world(0, 2)));
  release_stderr();
  SUCCEEDS(first);
  SUCCEEDS(second);
  CHECK(strncmp(caught, "r0 | MPI_Send -> 1 with tag 0 and token 00123456789b\n", 53) == 0);
  CHECK(strstr(caught, "\nr0 | MPI_Send done after ") != NULL);
  CHECK(strstr(caught, " s, token 00123456789b\nr0 | MPI_Barrier with token 00123456789c\n") != NULL);
  CHECK_EQUAL(atomic_load(&runtime.calls), 0x123456789cull);
}

TEST(a_failure_is_logged) {
  runtime.rank = 7;
  atomic_store(&runtime.log, true);
  fake->fail("MPI_Send", 1, 77);
  catch_stderr();
  ffi_error *error = RUN("send", ARRAY(F32, in, N), NONE, COMM(world(PLACE, SIZE)), 2, 9);
  release_stderr();
  FAILS(error, FFI_INTERNAL, "MPI_Send failed");
  CHECK(log_is("MPI_Send -> 2 with tag 9", "MPI_Send", "failed"));
}

TEST(nothing_is_logged_unasked) {
  uint64_t before = atomic_load(&runtime.calls);
  catch_stderr();
  ffi_error *error = RUN("barrier", NONE, NONE, COMM(world(PLACE, SIZE)));
  release_stderr();
  SUCCEEDS(error);
  CHECK_EQUAL(caught[0], '\0');
  CHECK_EQUAL(atomic_load(&runtime.calls), before);
}

/* --- the lock --- */

static void *barrier_in_thread(void *comm) { return RUN("barrier", NONE, NONE, COMM(comm)); }

/* Two threads at once; how many were inside MPI together. */
static int together(bool serialize, int linger_ms) {
  pthread_t threads[2];
  runtime.serialize = serialize;
  fake->linger_ms = linger_ms;
  struct communicator *comm = world(PLACE, SIZE);
  for (int i = 0; i < 2; i++)
    if (pthread_create(&threads[i], NULL, barrier_in_thread, comm) != 0) abort();
  for (int i = 0; i < 2; i++) {
    void *error;
    pthread_join(threads[i], &error);
    SUCCEEDS(error);
  }
  CHECK_EQUAL(times_called("MPI_Barrier"), 2);
  return fake->most_inside;
}

TEST(threads_call_together) { CHECK_EQUAL(together(false, 10000), 2); }

TEST(a_serialized_library_is_called_by_one) { CHECK_EQUAL(together(true, 50), 1); }
