/* The watch: what is reported of a call that waits, and what is not. */
#include "observe/watchdog.h"

#include <sys/stat.h>

#include "harness.h"

enum { PLACE = 1, SIZE = 3, N = 5, LONG_MS = 300, FOREVER_MS = 100000 };
#define LIMIT 0.04 /* seconds after which a call is reported */
#define NEVER 1000

static float in[SIZE * N], out[SIZE * N];

static void place(char *told, size_t size) { snprintf(told, size, "here.py:7"); }

static bool in_thread; /* whether the next operation runs in a thread of its own */
static void *barrier_in_thread(void *comm) { return RUN("barrier", NONE, NONE, *(int64_t *)comm); }

static ffi_error *run_in_thread(const int64_t *comm) {
  pthread_t thread;
  void *error;
  if (pthread_create(&thread, NULL, barrier_in_thread, (void *)comm) != 0) abort();
  pthread_join(thread, &error);
  return error;
}

static void start(double limit) {
  if (runtime.rank != 7) runtime.rank = 7; /* in COMM_WORLD, not in the communicator; the watch reads it */
  watchdog_configure(limit, false, place);
}

static char report_file[64]; /* that the watch leaves for a launcher; empty: it writes to stderr */

/* Return how many bytes the watch has written to stderr. Without stderr, whether it has left the file. */
static int64_t written(void) {
  struct stat file;
  if (report_file[0] != '\0') return stat(report_file, &file) == 0;
  return fstat(STDERR_FILENO, &file) == 0 ? file.st_size : 0;
}
static bool is_reported(void) { return written() > 0; }

/* Runs an operation that waits so long, or until `enough`, and takes what is said meanwhile. */
static void run_waiting(int ms, bool (*enough)(void), const char *operation, struct array a, struct array b,
                        const int64_t attributes[]) {
  catch_stderr();
  fake->linger_ms = ms;
  fake->enough = enough;
  ffi_error *error = in_thread ? run_in_thread(attributes) : run(operation, a, b, attributes);
  int64_t before = written();
  for (int i = 0; i < 10000 && before > 0 && written() == before && report_file[0] == '\0'; i++) usleep(1000);
  release_stderr(); /* the watch has said that it is done */
  SUCCEEDS(error);
}
/* The same until it is reported; the watch begins with it. */
static void run_watched(const char *operation, struct array a, struct array b, const int64_t attributes[]) {
  start(LIMIT);
  run_waiting(FOREVER_MS, is_reported, operation, a, b, attributes);
}
#define WAITING(operation, a, b, ...) run_watched(operation, a, b, (const int64_t[]){__VA_ARGS__})

static bool said(const char *pattern) { return is_like(caught, pattern, REG_NOSUB, NULL); }

TEST(what_waits_is_reported_once) {
  start(LIMIT);
  struct communicator *comm = world(PLACE, SIZE);
  atomic_store(&comm->name, "weather");
  WAITING("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(comm), reduction("SUM"));
  CHECK(
      said("^jaxmpi: rank 7 has been waiting for [0-9.]+ s in allreduce of 5 float32, op SUM, as rank 1 of 3 on "
           "weather [(]operation [0-9]+ of its thread[)]; Python is at here.py:7\n"
           "jaxmpi: rank 7 is done with operation [0-9]+ after [0-9.]+ s\n$"));
  atomic_store(&comm->name, NULL);
}

TEST(attributes_are_named) {
  int64_t comm = COMM(world(PLACE, SIZE));
  WAITING("send", ARRAY(F32, in, N), NONE, comm, 2, 9);
  CHECK(said("in send of 5 float32, dest 2, tag 9, as rank 1 of 3 on a communicator "));
  WAITING("bcast", NONE, ARRAY(F32, out, N), comm, 2);
  CHECK(said("in bcast of 5 float32, root 2, as rank 1 of 3"));
  WAITING("barrier", NONE, NONE, comm);
  CHECK(said("in barrier, as rank 1 of 3"));
  derivative = 2;
  WAITING("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), comm, reduction("MAX"));
  CHECK(said("of 5 float32 [(]a cotangent[)], op MAX"));
  float data[N] = {0};
  fake->deliver(world(PLACE, SIZE)->handle, 2, 4, data, sizeof data);
  WAITING("recv", NONE, ARRAY(F32, out, N), comm, fake->any_source, 0, fake->any_tag);
  CHECK(said("in recv of 5 float32, source any rank, any tag, as"));
}

TEST(lines_of_the_program_are_named) {
  struct communicator *comm = world(PLACE, SIZE);
  int64_t attributes[] = {COMM(comm), 0, 2}; /* comm, derivative, root */
  int row = ROW_bcast;
  CHECK(call_site_add(row, attributes, F32, N, "a.py:1 (f)"));
  CHECK(call_site_add(row, attributes, F32, N, "a.py:1 (f)"));
  CHECK(call_site_add(row, attributes, F32, 2 * N, "b.py:2 (g)"));
  WAITING("bcast", NONE, ARRAY(F32, out, N), COMM(comm), 2);
  CHECK(said("; called at a.py:1 [(]f[)]; Python"));
  WAITING("bcast", NONE, ARRAY(F32, out, 2 * N), COMM(comm), 2);
  CHECK(said("; called at b.py:2 [(]g[)]; Python"));
  WAITING("bcast", NONE, ARRAY(F32, out, 3), COMM(comm), 2); /* another call */
  CHECK(!said("called at"));
  watchdog_stop(); /* it reads what changes */
  comm->chunk = LEAST_CHUNK;
  WAITING("bcast", NONE, ARRAY(F32, out, 3), COMM(comm), 2); /* it may be a chunk: any of them */
  watchdog_stop();
  comm->chunk = 0;
  CHECK(said("; called at b.py:2 [(]g[)] or a.py:1 [(]f[)]; Python"));
  WAITING("bcast", NONE, ARRAY(F32, out, N), COMM(comm), 0);
  CHECK(!said("called at"));
  for (int i = 0; i < 5; i++) {
    char line[24];
    snprintf(line, sizeof line, "c.py:%d", i);
    CHECK(call_site_add(row, attributes, F32, 4, line));
  }
  WAITING("bcast", NONE, ARRAY(F32, out, 4), COMM(comm), 2);
  CHECK(said("called at c.py:4 or c.py:3 or c.py:2 or 2 more lines; Python"));
}

TEST(what_does_not_wait_is_not_reported) {
  start(NEVER);
  for (int i = 0; i < 100; i++)
    run_waiting(0, NULL, "barrier", NONE, NONE, (const int64_t[]){COMM(world(PLACE, SIZE))});
  run_waiting(LONG_MS, NULL, "barrier", NONE, NONE, (const int64_t[]){COMM(world(PLACE, SIZE))});
  CHECK_EQUAL(caught[0], '\0');
}

TEST(a_failure_ends_the_wait) {
  start(LIMIT);
  fake->fail("MPI_Send", 1, 77);
  ffi_error *error = RUN("send", ARRAY(F32, in, N), NONE, COMM(world(PLACE, SIZE)), 2, 9);
  FAILS(error, FFI_INTERNAL, "MPI_Send failed");
  catch_stderr();
  usleep(1000 * LONG_MS);
  release_stderr();
  CHECK_EQUAL(caught[0], '\0');
}

TEST(reports_get_rarer) {
  start(LIMIT);
  double limit = LIMIT;
  for (int i = 0; i < 4; i++, limit *= 2) {
    run_waiting(FOREVER_MS, is_reported, "barrier", NONE, NONE, (const int64_t[]){COMM(world(PLACE, SIZE))});
    const char *seconds = strstr(caught, "waiting for ");
    if (CHECK(seconds != NULL)) CHECK(atof(seconds + strlen("waiting for ")) >= limit);
  }
}

TEST(nothing_is_said_after_the_end) {
  start(LIMIT);
  watchdog_stop();
  run_waiting(LONG_MS, NULL, "barrier", NONE, NONE, (const int64_t[]){COMM(world(PLACE, SIZE))});
  CHECK_EQUAL(caught[0], '\0');
}

/* Records are used again, but numbers begin anew. */
TEST(threads_count_for_themselves) {
  for (int i = 0; i < 3; i++) {
    start(LIMIT);
    in_thread = true;
    WAITING("barrier", NONE, NONE, COMM(world(PLACE, SIZE)));
    in_thread = false;
    CHECK(said("[(]operation 1 of its thread[)].*is done with operation 1 after"));
  }
}

/* Two jobs, of 16 and 17 ranks, that have a launcher. */
TEST(among_many_ranks_the_launcher_tells) {
  char folder[] = "/tmp/jaxmpi-test-XXXXXX", file[64];
  struct communicator *before = runtime.world;
  if (mkdtemp(folder) == NULL || setenv("JAXMPI_JOB_FOLDER", folder, 1) != 0) abort();
  for (int size = 16; size <= 17; size++) {
    runtime.world = world(PLACE, size);
    snprintf(file, sizeof file, "%s/7.report", folder);
    if (size == 17) memcpy(report_file, file, sizeof file);
    WAITING("barrier", NONE, NONE, COMM(world(PLACE, size)));
    watchdog_stop(); /* it reads what changes */
    CHECK_EQUAL(said("waiting for"), size == 16);
    CHECK_EQUAL(said("is done"), size == 16);
    CHECK_EQUAL(unlink(file), 0);
  }
  runtime.world = before;
  report_file[0] = '\0';
  CHECK_EQUAL(rmdir(folder), 0);
}
