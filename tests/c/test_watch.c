/* The watch: what is reported of a call that waits, and what is not. */
#include "observe/watchdog.h"

#include "harness.h"

/* A call waits this long in the fake, unless it is told to be short; it is reported after LIMIT seconds. */
enum { PLACE = 1, SIZE = 3, N = 5, LONG_MS = 300 };
#define LIMIT 0.04

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

static void start(void) {
  if (runtime.rank != 7) runtime.rank = 7; /* in COMM_WORLD, not in the communicator; the watch reads it */
  watchdog_configure(LIMIT, false, place);
}

/* Runs an operation that waits, and takes what is said meanwhile and just after. */
static void run_waiting(int ms, const char *operation, struct array a, struct array b, const int64_t attributes[]) {
  catch_stderr();
  fake->linger_ms = ms;
  ffi_error *error = in_thread ? run_in_thread(attributes) : run(operation, a, b, attributes);
  usleep(100000); /* for the watch to see that it is done */
  release_stderr();
  SUCCEEDS(error);
}
/* The same as the watch begins. */
static void run_watched(const char *operation, struct array a, struct array b, const int64_t attributes[]) {
  start();
  run_waiting(LONG_MS, operation, a, b, attributes);
}
#define WAITING(operation, a, b, ...) run_watched(operation, a, b, (const int64_t[]){__VA_ARGS__})

static bool said(const char *pattern) { return is_like(caught, pattern, REG_NOSUB, NULL); }

TEST(what_waits_is_reported_once) {
  start();
  struct communicator *comm = world(PLACE, SIZE);
  atomic_store(&comm->name, "weather");
  WAITING("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(comm), reduction("SUM"));
  CHECK(
      said("^jaxmpi: rank 7 has been waiting for 0[.][0-9]+ s in allreduce of 5 float32, op SUM, as rank 1 of 3 on "
           "weather [(]operation [0-9]+ of its thread[)]; Python is at here.py:7\n"
           "jaxmpi: rank 7 is done with operation [0-9]+ after 0[.][0-9]+ s\n$"));
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
  start();
  for (int i = 0; i < 100; i++) {
    run_waiting(0, "barrier", NONE, NONE, (const int64_t[]){COMM(world(PLACE, SIZE))});
    CHECK_EQUAL(caught[0], '\0');
    i += 10;
  }
}

TEST(a_failure_ends_the_wait) {
  start();
  fake->fail("MPI_Send", 1, 77);
  ffi_error *error = RUN("send", ARRAY(F32, in, N), NONE, COMM(world(PLACE, SIZE)), 2, 9);
  FAILS(error, FFI_INTERNAL, "MPI_Send failed");
  run_waiting(0, "barrier", NONE, NONE, (const int64_t[]){COMM(world(PLACE, SIZE))});
  CHECK_EQUAL(caught[0], '\0');
}

TEST(reports_get_rarer) {
  start();
  struct array one = ARRAY(F32, in, N), result = ARRAY(F32, out, N);
  int reports = 0;
  for (int i = 0; i < 4; i++) {
    run_waiting(200, "allreduce", one, result, (const int64_t[]){COMM(world(PLACE, SIZE)), reduction("SUM")});
    reports += said("waiting");
  }
  CHECK(reports >= 2 && reports <= 3); /* after 0.04, 0.08, 0.16 and not 0.32 s */
}

TEST(nothing_is_said_after_the_end) {
  start();
  watchdog_stop();
  run_waiting(LONG_MS, "barrier", NONE, NONE, (const int64_t[]){COMM(world(PLACE, SIZE))});
  CHECK_EQUAL(caught[0], '\0');
}

/* Records are used again, but numbers begin anew. */
TEST(threads_count_for_themselves) {
  for (int i = 0; i < 3; i++) {
    start();
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
    start();
    WAITING("barrier", NONE, NONE, COMM(world(PLACE, size)));
    watchdog_stop(); /* it reads what changes */
    CHECK_EQUAL(said("waiting for"), size == 16);
    CHECK_EQUAL(said("is done"), size == 16);
    snprintf(file, sizeof file, "%s/7.report", folder);
    CHECK_EQUAL(unlink(file), 0);
  }
  runtime.world = before;
  CHECK_EQUAL(rmdir(folder), 0);
}
