/* The timeline: what is written of operations, and when some cannot be. */
#define _GNU_SOURCE
#include "core/timeline.h"

#include <errno.h>
#include <regex.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/words.h"
#include "harness.h"

enum { PLACE = 1, SIZE = 3, N = 5, MANY = 2000 };
static float in[SIZE * N], out[SIZE * N];
static char path[] = "/tmp/jaxmpi-timeline-XXXXXX";
static char *text; /* of the file, once it is closed */

static void begin(int64_t limit) {
  if (strchr(path, 'X') != NULL) close(mkstemp(path));
  runtime.rank = 7;
  CHECK_EQUAL(timeline_open(path, limit), 0);
}

static void read_file(void) {
  static char memory[1 << 21];
  FILE *file = fopen(path, "r");
  memory[file != NULL ? fread(memory, 1, sizeof memory - 1, file) : 0] = '\0';
  if (file != NULL) fclose(file);
  text = memory;
}

static void end(void) {
  timeline_close();
  read_file();
  context("a timeline '%.3000s'", text);
}

static bool has(const char *pattern) {
  regex_t regex;
  if (regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB | REG_NEWLINE) != 0) return CHECK(false);
  int unlike = regexec(&regex, text, 0, NULL, 0);
  regfree(&regex);
  return unlike == 0;
}

static int lines_of(const char *name) {
  int count = 0;
  for (const char *at = text; (at = strstr(at, name)) != NULL; at++) count++;
  return count;
}

#define TIMES  "\"ts\":[0-9]+[.][0-9]{3},\"dur\":[0-9]+[.][0-9]{3},"
#define PLACED "\"ph\":\"X\",\"pid\":7,\"tid\":1," TIMES

static void operations_are_written(void) {
  struct communicator *comm = world(PLACE, SIZE);
  int64_t number = COMM(comm), sites[] = {number, 0, 2};
  CHECK(words_add_site(ROW_bcast, sites, F32, N, "a \"b\" \\ c.py:3 (f)"));
  begin(1 << 20);
  SUCCEEDS(RUN("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), number, reduction("SUM")));
  SUCCEEDS(RUN("bcast", NONE, ARRAY(F32, out, N), number, 2));
  SUCCEEDS(RUN("barrier", NONE, NONE, number));
  fake->deliver(comm->handle, 2, 9, in, sizeof(float) * N);
  SUCCEEDS(RUN("recv", NONE, ARRAY(F32, out, N), number, fake->any_source, 0, fake->any_tag));
  fake->fail("MPI_Send", 1, 77);
  FAILS(RUN("send", ARRAY(F32, in, N), NONE, number, 2, 4), FFI_INTERNAL, "MPI_Send failed");
  end();
  CHECK(has("^[[]$"));
  CHECK(has("^[{]\"name\":\"allreduce\"," PLACED "\"args\":[{]\"comm\":[0-9]+,\"op\":\"SUM\",\"count\":5,"
            "\"dtype\":\"float32\",\"sent\":20,\"received\":20[}][}],$"));
  CHECK(has(
      "^[{]\"name\":\"bcast\".*\"root\":2,.*\"received\":20,\"line\":\"a \\\\\"b\\\\\" \\\\\\\\ c.py:3 [(]f[)]\"[}]"));
  CHECK(has("^[{]\"name\":\"barrier\"," PLACED "\"args\":[{]\"comm\":[0-9]+[}][}],$"));
  CHECK(has("^[{]\"name\":\"recv\".*\"from\":2,\"from_tag\":9,\"count\":5"));
  CHECK(has("^[{]\"name\":\"send\".*\"dest\":2,\"tag\":4,.*\"sent\":20,\"failed\":true[}]"));
  CHECK(has("^[{]\"name\":\"jaxmpi_end\",.*\"lost\":0,\"limit\":false[}][}]$"));
  CHECK_EQUAL(lines_of("\"ts\""), 5);
}

static void nothing_is_written_unasked(void) {
  begin(1 << 20);
  end();
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(world(PLACE, SIZE))));
  read_file();
  CHECK_EQUAL(lines_of("barrier"), 0);
}

static void *many_barriers(void *comm) {
  ffi_error *error = NULL;
  for (int i = 0; i < MANY && error == NULL; i++) error = RUN("barrier", NONE, NONE, *(int64_t *)comm);
  return error;
}

/* More than a block holds, by two threads at once, while the writer writes; a third then takes the place of one. */
static void threads_have_tracks(void) {
  pthread_t threads[2];
  void *error;
  int64_t comm = COMM(world(PLACE, SIZE));
  begin(1 << 20);
  for (int i = 0; i < 2; i++)
    if (pthread_create(&threads[i], NULL, many_barriers, &comm) != 0) abort();
  for (int i = 0; i < 2; i++) pthread_join(threads[i], &error), SUCCEEDS(error);
  if (pthread_create(&threads[0], NULL, many_barriers, &comm) != 0) abort();
  pthread_join(threads[0], &error);
  SUCCEEDS(error);
  end();
  CHECK_EQUAL(lines_of("\"barrier\""), 3 * MANY);
  CHECK(has("\"lost\":0,"));
  CHECK(!has("\"tid\":4,"));
}

static void *barrier(void *comm) { return RUN("barrier", NONE, NONE, *(int64_t *)comm); }

static void what_takes_long_is_begun(void) {
  begin(1 << 20);
  fake->linger_ms = 1300;
  pthread_t thread;
  void *error;
  int64_t comm = COMM(world(PLACE, SIZE));
  if (pthread_create(&thread, NULL, barrier, &comm) != 0) abort();
  usleep(1250000);
  read_file(); /* as if the process were killed now */
  CHECK(has(
      "^[{]\"name\":\"barrier\",\"ph\":\"B\",\"pid\":7,\"tid\":[0-9],\"ts\":[0-9]+[.][0-9]{3},\"args\":[{]\"comm\":"));
  CHECK_EQUAL(lines_of("\"barrier\""), 1);
  pthread_join(thread, &error);
  SUCCEEDS(error);
  fake->linger_ms = 0;
  SUCCEEDS(barrier(&comm));
  end();
  CHECK_EQUAL(lines_of("\"ph\":\"B\""), 1);
  CHECK_EQUAL(lines_of("\"ph\":\"E\""), 1);
  CHECK_EQUAL(lines_of("\"ph\":\"X\""), 1);
}

static void a_file_has_a_limit(void) {
  begin(1000);
  int64_t comm = COMM(world(PLACE, SIZE));
  CHECK(many_barriers(&comm) == NULL);
  end();
  CHECK(strlen(text) < 1000 + 120);
  CHECK(has("\"lost\":19[0-9][0-9],\"limit\":true"));
}

static void a_full_disk_ends_it(void) {
  runtime.rank = 7;
  CHECK_EQUAL(timeline_open("/dev/full", 1 << 20), ENOSPC);
  CHECK(!atomic_load(&timeline_on));
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(world(PLACE, SIZE))));
  CHECK_EQUAL(timeline_open("/no/such/folder/file", 1 << 20), ENOENT);
}

static const struct test tests[] = {
    TEST(operations_are_written),   TEST(nothing_is_written_unasked), TEST(threads_have_tracks),
    TEST(what_takes_long_is_begun), TEST(a_file_has_a_limit),         TEST(a_full_disk_ends_it),
};

MAIN(tests)
