/* The debug log, and the lock for a library that allows one call at a time. */
#define _GNU_SOURCE
#include <regex.h>
#include <stdlib.h>
#include <unistd.h>

#include "harness.h"

enum { PLACE = 1, SIZE = 3, N = 5 };
static float in[SIZE * N], out[SIZE * N];

/* --- the log --- */

static char text[8192]; /* what went to stderr between the two below */
static FILE *caught;
static int usual_stderr;

static void catch_stderr(void) {
  fflush(stderr);
  caught = tmpfile();
  usual_stderr = dup(STDERR_FILENO);
  if (caught == NULL || usual_stderr < 0 || dup2(fileno(caught), STDERR_FILENO) < 0) abort();
}

static void release_stderr(void) {
  fflush(stderr);
  dup2(usual_stderr, STDERR_FILENO);
  close(usual_stderr);
  rewind(caught);
  text[fread(text, 1, sizeof text - 1, caught)] = '\0';
  fclose(caught);
}

/* Whether the log is two lines: `r7 | ` and the pattern, a token; and an end with the same token. */
static bool log_is(const char *begins, const char *function, const char *end) {
  char pattern[512];
  regex_t regex;
  regmatch_t match[3];
  snprintf(pattern, sizeof pattern,
           "^r7 [|] %s and token ([0-9a-f]{12})\nr7 [|] %s %s after [0-9][.][0-9][0-9]e[-+][0-9][0-9] s, "
           "token ([0-9a-f]{12})\n$",
           begins, function, end);
  if (regcomp(&regex, pattern, REG_EXTENDED) != 0) return CHECK(false);
  int unlike = regexec(&regex, text, 3, match, 0);
  regfree(&regex);
  return unlike == 0 && strncmp(text + match[1].rm_so, text + match[2].rm_so, 12) == 0;
}

static void run_logged(const char *operation, struct array a, struct array b, const int64_t attributes[]) {
  runtime.rank = 7; /* in COMM_WORLD, not in the communicator */
  atomic_store(&runtime.log, true);
  catch_stderr();
  ffi_error *error = run(operation, a, b, attributes);
  release_stderr();
  atomic_store(&runtime.log, false);
  context("%s, which logged '%s'", operation, text);
  SUCCEEDS(error);
}
#define LOGGED(operation, a, b, ...) run_logged(operation, a, b, (const int64_t[]){__VA_ARGS__})

static void collectives_are_logged(void) {
  int64_t comm = COMM(world(PLACE, SIZE)), sum = reduction("SUM");
  struct array one = ARRAY(F32, in, N), all = MATRIX(F32, in, SIZE, N);
  struct array result = ARRAY(F32, out, N), results = MATRIX(F32, out, SIZE, N);
  LOGGED("allgather", one, results, comm);
  CHECK(log_is("MPI_Allgather with 5 items", "MPI_Allgather", "done"));
  LOGGED("allreduce", one, result, comm, sum);
  CHECK(log_is("MPI_Allreduce with 5 items", "MPI_Allreduce", "done"));
  LOGGED("alltoall", all, results, comm);
  CHECK(log_is("MPI_Alltoall with 15 items", "MPI_Alltoall", "done"));
  LOGGED("bcast", one, NONE, comm, PLACE);
  CHECK(log_is("MPI_Bcast from 1 with 5 items", "MPI_Bcast", "done"));
  LOGGED("bcast", NONE, result, comm, 2);
  CHECK(log_is("MPI_Bcast from 2 with 5 items", "MPI_Bcast", "done"));
  LOGGED("gather", one, NONE, comm, 2);
  CHECK(log_is("MPI_Gather -> 2 with 5 items", "MPI_Gather", "done"));
  LOGGED("reduce", one, NONE, comm, sum, 2);
  CHECK(log_is("MPI_Reduce -> 2 with 5 items", "MPI_Reduce", "done"));
  LOGGED("scan", one, result, comm, sum);
  CHECK(log_is("MPI_Scan with 5 items", "MPI_Scan", "done"));
  LOGGED("scatter", NONE, result, comm, 2);
  CHECK(log_is("MPI_Scatter from 2 with 5 items", "MPI_Scatter", "done"));
}

static void messages_are_logged(void) {
  int64_t comm = COMM(world(PLACE, SIZE));
  struct array sent = ARRAY(F32, in, N), result = ARRAY(F32, out, N);
  LOGGED("send", sent, NONE, comm, 2, 9);
  CHECK(log_is("MPI_Send -> 2 with tag 9", "MPI_Send", "done"));
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, sizeof(float) * N);
  LOGGED("recv", NONE, result, comm, 2, 0, 9);
  CHECK(log_is("MPI_Recv <- 2 with tag 9", "MPI_Recv", "done"));
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, in, sizeof(float) * N);
  LOGGED("sendrecv", sent, result, comm, 0, 9, 5, 2, 0);
  CHECK(log_is("MPI_Sendrecv <- 2 with tag 9 -> 0 with tag 5", "MPI_Sendrecv", "done"));
}

/* The form of the line to the letter, and that tokens count up. */
static void a_line_has_this_form(void) {
  runtime.rank = 0;
  atomic_store(&runtime.calls, 0x123456789aull);
  atomic_store(&runtime.log, true);
  catch_stderr();
  ffi_error *first = RUN("send", ARRAY(F32, in, N), NONE, COMM(world(0, 2)), 1, 0);
  ffi_error *second = RUN("barrier", NONE, NONE, COMM(world(0, 2)));
  release_stderr();
  SUCCEEDS(first);
  SUCCEEDS(second);
  context("%s", text);
  CHECK(strncmp(text, "r0 | MPI_Send -> 1 with tag 0 and token 00123456789b\n", 53) == 0);
  CHECK(strstr(text, "\nr0 | MPI_Send done after ") != NULL);
  CHECK(strstr(text, " s, token 00123456789b\nr0 | MPI_Barrier with token 00123456789c\n") != NULL);
  CHECK_EQUAL(atomic_load(&runtime.calls), 0x123456789cull);
}

static void a_failure_is_logged(void) {
  runtime.rank = 7;
  atomic_store(&runtime.log, true);
  fake->fail("MPI_Send", 1, 77);
  catch_stderr();
  ffi_error *error = RUN("send", ARRAY(F32, in, N), NONE, COMM(world(PLACE, SIZE)), 2, 9);
  release_stderr();
  FAILS(error, FFI_INTERNAL, "MPI_Send failed");
  CHECK(log_is("MPI_Send -> 2 with tag 9", "MPI_Send", "failed"));
}

static void nothing_is_logged_unasked(void) {
  uint64_t before = atomic_load(&runtime.calls);
  catch_stderr();
  ffi_error *error = RUN("barrier", NONE, NONE, COMM(world(PLACE, SIZE)));
  release_stderr();
  SUCCEEDS(error);
  CHECK_EQUAL(text[0], '\0');
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

static void threads_call_together(void) { CHECK_EQUAL(together(false, 10000), 2); }

static void a_serialized_library_is_called_by_one(void) { CHECK_EQUAL(together(true, 50), 1); }

static const struct test tests[] = {
    TEST(collectives_are_logged),
    TEST(messages_are_logged),
    TEST(a_line_has_this_form),
    TEST(a_failure_is_logged),
    TEST(nothing_is_logged_unasked),
    TEST(threads_call_together),
    TEST(a_serialized_library_is_called_by_one),
};

MAIN(tests)
