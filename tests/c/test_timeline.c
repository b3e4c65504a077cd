/* The timeline: what is written of operations, and when some cannot be. */
#include "observe/timeline.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "observe/summary.h"
#include "harness.h"

enum { PLACE = 1, SIZE = 3, N = 5, MANY = 2000 };
static float in[SIZE * N], out[SIZE * N];
static char folder[] = "/tmp/jaxmpi-timeline-XXXXXX";
static char name[32], path[sizeof folder + sizeof name]; /* of the newest file */
static char *text;                                       /* of the file, once it is closed */

static void remove_folder(void) { rmdir(folder); }

static int new_file(void) { return open(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND, 0600); }

static void begin(int64_t limit) {
  static int files;
  if (files == 0 && mkdtemp(folder) == NULL) abort();
  if (files == 0) atexit(remove_folder);
  snprintf(name, sizeof name, "%d.json", ++files);
  snprintf(path, sizeof path, "%s/%s", folder, name);
  runtime.rank = 7;
  CHECK_EQUAL(timeline_open(new_file(), limit), 0);
}

static void read_file(void) {
  static char memory[1 << 22];
  FILE *file = fopen(path, "r");
  memory[file != NULL ? fread(memory, 1, sizeof memory - 1, file) : 0] = '\0';
  if (file != NULL) fclose(file);
  text = memory;
}

static void end(void) {
  timeline_close();
  read_file();
  remove(path);
  context("a timeline '%.3000s'", text);
}

static bool has(const char *pattern) { return is_like(text, pattern, REG_NOSUB | REG_NEWLINE, NULL); }

static int lines_of(const char *name) {
  int count = 0;
  for (const char *at = text; (at = strstr(at, name)) != NULL; at++) count++;
  return count;
}

#define TIMES  "\"ts\":[0-9]+[.][0-9]{3},\"dur\":[0-9]+[.][0-9]{3},"
#define PLACED "\"ph\":\"X\",\"pid\":7,\"tid\":1," TIMES

TEST(operations_are_written) {
  struct communicator *comm = world(PLACE, SIZE);
  int64_t number = COMM(comm), sites[] = {number, 0, 2};
  CHECK(call_site_add(ROW_bcast, sites, F32, N, "a \"b\" \\ c.py:3 (f)"));
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

TEST(nothing_is_written_unasked) {
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
TEST(threads_have_tracks) {
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

/* Which has the file, but not the thread that writes. */
TEST(a_child_of_fork_leaves_it_alone) {
  int status = -1;
  begin(1 << 20);
  pid_t child = fork();
  if (child == 0) {
    alarm(5);
    timeline_note("of the child\n");
    timeline_close();
    _exit(0);
  }
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK_EQUAL(status, 0);
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(world(PLACE, SIZE))));
  end();
  CHECK(!has("of the child"));
  CHECK_EQUAL(lines_of("\"barrier\""), 1);
  CHECK_EQUAL(lines_of("jaxmpi_end"), 1);
}

static void *barrier(void *comm) { return RUN("barrier", NONE, NONE, *(int64_t *)comm); }

/* The number of the track on which there is the first line of a phase; -1: there is none. */
static int track_of_phase(char phase) {
  char begin[] = "\"ph\":\"?\",\"pid\":7,\"tid\":";
  begin[6] = phase;
  const char *line = strstr(text, begin);
  return line != NULL ? atoi(line + strlen(begin)) : -1;
}

TEST(what_takes_long_is_begun) {
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
  CHECK(track_of_phase('B') > 0);
  CHECK_EQUAL(track_of_phase('E'), track_of_phase('B'));
}

TEST(a_file_has_a_limit) {
  begin(1000);
  int64_t comm = COMM(world(PLACE, SIZE));
  CHECK(many_barriers(&comm) == NULL);
  end();
  CHECK(strlen(text) < 1000 + 120);
  CHECK(has("\"lost\":19[0-9][0-9],\"limit\":true"));
}

/* As a full disk does, a limit of the system's stops files from growing; 0: as before. */
static void limit_files(rlim_t bytes) {
  static struct rlimit usual;
  if (bytes > 0) getrlimit(RLIMIT_FSIZE, &usual);
  signal(SIGXFSZ, bytes > 0 ? SIG_IGN : SIG_DFL);
  setrlimit(RLIMIT_FSIZE, bytes > 0 ? &(struct rlimit){bytes, usual.rlim_max} : &usual);
}

TEST(a_full_disk_ends_it) {
  snprintf(path, sizeof path, "%s/full.json", folder);
  limit_files(1);
  int error = timeline_open(new_file(), 1 << 20);
  limit_files(0);
  CHECK_EQUAL(error, EFBIG);
  CHECK(!atomic_load(&timeline_on));
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(world(PLACE, SIZE))));
  remove(path);
}

/* Later: what is there stays as it is, to a line that is cut, and it is said once. */
TEST(a_disk_that_becomes_full_ends_it) {
  enum { ROOM = 300 };
  int64_t comm = COMM(world(PLACE, SIZE));
  begin(1 << 20);
  catch_stderr();
  limit_files(ROOM);
  void *error = many_barriers(&comm);
  for (int i = 0; i < 300 && atomic_load(&timeline_on); i++) usleep(10000);
  bool on = atomic_load(&timeline_on);
  limit_files(0);
  usleep(250000); /* the writer looks again */
  void *after = barrier(&comm);
  timeline_close();
  release_stderr();
  SUCCEEDS(error);
  SUCCEEDS(after);
  CHECK(!on);
  static const char told[] = "jaxmpi: rank 7 cannot write its timeline any more: ";
  CHECK(strncmp(caught, told, sizeof told - 1) == 0 && strstr(caught + 1, "jaxmpi: ") == NULL);
  read_file();
  CHECK_EQUAL(strlen(text), ROOM);
  remove(path);
}

/* A name of any length, with any bytes, stands in a line that is whole. */
TEST(names_may_be_long) {
  static char site[3][70000];
  struct communicator *comm = world(PLACE, SIZE);
  int64_t number = COMM(comm), root[] = {number, 0, 2};
  for (int i = 0; i < 3; i++) {
    size_t length = i == 0 ? 4000 : sizeof site[i] - 100;
    for (size_t at = 0; at < length; at++) site[i][at] = "a\n\"\\\xc3\xa9"[(at + (size_t)i) % 6];
    snprintf(site[i] + length, 100, "/c.py:%d (f)", 10 + i);
    CHECK(call_site_add(ROW_bcast, root, F32, 3, site[i]));
  }
  begin(1 << 22);
  SUCCEEDS(RUN("barrier", NONE, NONE, number));
  SUCCEEDS(RUN("bcast", NONE, ARRAY(F32, out, 3), number, 2));
  SUCCEEDS(RUN("barrier", NONE, NONE, number));
  end();
  const char *first = strstr(text, "/c.py:12 (f) or "), *second = strstr(text, "/c.py:11 (f) or ");
  const char *before = strstr(text, "{\"name\":\"barrier\"");
  CHECK(before != NULL && before < first);
  CHECK(first != NULL && second > first && strstr(second, "/c.py:10 (f)\"}},\n{\"name\":\"barrier\"") != NULL);
  CHECK_EQUAL(lines_of("\\u000a"), 4000 / 6 + 2 * (sizeof site[0] - 100) / 6 + 1);
  CHECK(strlen(text) > 144000);
}

enum { THREADS = 1000 };
static pthread_mutex_t all_there = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t go_on = PTHREAD_COND_INITIALIZER;
static int sent_once;
static struct sending {
  int64_t comm;
  int tag;
} sends[THREADS];

static void *send_twice(void *given) {
  const struct sending *send = given;
  ffi_error *error = RUN("send", ARRAY(F32, in, N), NONE, send->comm, 2, send->tag);
  pthread_mutex_lock(&all_there); /* none has the place of another */
  if (++sent_once == THREADS) pthread_cond_broadcast(&go_on);
  while (sent_once < THREADS) pthread_cond_wait(&go_on, &all_there);
  pthread_mutex_unlock(&all_there);
  return error != NULL ? error : RUN("send", ARRAY(F32, in, N), NONE, send->comm, 2, send->tag);
}

/* All that a thread does is on one track, and on that nothing else, however many threads come while the file is being
 * written. */
TEST(tracks_keep_their_numbers) {
  static pthread_t threads[THREADS];
  static int track_of[THREADS], tag_of[4 * THREADS];
  int64_t comm = COMM(world(PLACE, SIZE));
  void *error;
  begin(1 << 22);
  for (int i = 0; i < THREADS; i++) {
    sends[i] = (struct sending){comm, i + 1};
    if (pthread_create(&threads[i], NULL, send_twice, &sends[i]) != 0) abort();
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], &error), SUCCEEDS(error);
  end();
  int events = 0, tag, track, highest = 0;
  for (char *at = text; (at = strstr(at, "{\"name\":\"send\"")) != NULL; at++) {
    const char *place = strstr(at, "\"tid\":"), *given = strstr(at, "\"tag\":");
    CHECK(sscanf(place, "\"tid\":%d", &track) == 1 && sscanf(given, "\"tag\":%d", &tag) == 1);
    if (!CHECK(track > 0 && track < 4 * THREADS && tag > 0 && tag <= THREADS)) return;
    events += strncmp(strstr(at, "\"ph\":"), "\"ph\":\"B\"", 8) != 0;
    CHECK(track_of[tag - 1] == 0 || track_of[tag - 1] == track);
    CHECK(tag_of[track] == 0 || tag_of[track] == tag);
    track_of[tag - 1] = track, tag_of[track] = tag;
    if (track > highest) highest = track;
  }
  CHECK_EQUAL(events, 2 * THREADS);
  CHECK(highest < THREADS + 10);
}

#ifdef __linux__
static _Atomic time_t ahead; /* of the time of day, as before it is set back */

int clock_gettime(clockid_t clock, struct timespec *time) {
  int result = (int)syscall(SYS_clock_gettime, clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += ahead;
  return result;
}

TEST(the_time_of_day_may_be_set_back) {
  int64_t comm = COMM(world(PLACE, SIZE));
  ahead = 3600;
  begin(1 << 20);
  SUCCEEDS(barrier(&comm));
  int barriers = 0;
  for (int i = 0; i < 3000 && barriers == 0; i++) {
    usleep(10000);
    read_file();
    barriers = lines_of("barrier");
  }
  ahead = 0;
  end();
  CHECK_EQUAL(barriers, 1);
}
#endif
