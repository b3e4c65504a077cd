/* What a rank leaves in the job's folder. */
#include "core/job.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "harness.h"

/* The folder's path is long: PARTS folders of this many characters, one in the other. */
enum { PARTS = 15, PART = 200, LONGEST = PARTS * (PART + 1) + 64 };

static char base[] = "/tmp/jaxmpi-job-XXXXXX", path[LONGEST], text[64];
static int in = -1; /* the folder */
static int bell;    /* in which the launcher rings */

void prepare(void) {
  if (in >= 0) return;
  runtime.rank = 7;
  if (mkdtemp(base) == NULL) abort();
  int length = snprintf(path, sizeof path, "%s", base);
  for (int part = 0; part < PARTS; part++) {
    length += snprintf(path + length, sizeof path - (size_t)length, "/%0*d", PART, part);
    if (mkdir(path, 0700) != 0) abort();
  }
  if ((in = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) abort();
  if (mkfifoat(in, "bell", 0600) != 0 || (bell = openat(in, "bell", O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0) abort();
  CHECK(!job_has_folder());
  setenv("JAXMPI_JOB_FOLDER", path, 1);
  job_begin();
  unsetenv("JAXMPI_JOB_FOLDER");
  CHECK(job_has_folder());
}

/* What is in a file of the folder; "none" if there is none. */
static const char *content(const char *name) {
  int file = openat(in, name, O_RDONLY | O_NOFOLLOW);
  if (file < 0) return "none";
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  text[length > 0 ? length : 0] = '\0';
  return text;
}

static void leave(int folder, const char *name, const char *what) {
  int file = openat(folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  CHECK_EQUAL(write(file, what, strlen(what)), (ssize_t)strlen(what));
  close(file);
}

static const char *asked(void) {
  static char question[16];
  job_question(question, sizeof question);
  return question;
}

static void ring(void) { CHECK_EQUAL(write(bell, "?", 1), 1); }

TEST(files_are_left_and_questions_read) {
  job_tell("state", "first", 5);
  CHECK(strcmp(content("7.state"), "first") == 0);
  job_tell("state", "next", 4);
  CHECK(strcmp(content("7.state"), "next") == 0);
  CHECK(strcmp(content("7.state.draft"), "none") == 0);
  CHECK(strcmp(asked(), "") == 0);
  leave(in, "ask", "42");
  CHECK(strcmp(asked(), "") == 0);
  ring();
  CHECK(strcmp(asked(), "42") == 0);
  CHECK(strcmp(asked(), "42") == 0); /* nobody takes it */
}

/* The number of the descriptor that is kept may be another file's. */
TEST(the_program_closes_what_is_ours) {
  struct stat ours, found;
  leave(in, "ask", "42");
  ring();
  CHECK(strcmp(asked(), "42") == 0);
  CHECK_EQUAL(fstat(bell, &ours), 0);
  for (int file = 3; file < 100; file++) {
    if (file == bell || fstat(file, &found) != 0 || found.st_ino != ours.st_ino) continue;
    CHECK(dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), file) == file);
  }
  CHECK(strcmp(asked(), "42") == 0);
}

/* Cut to 511 characters the path names a file in one of the folders around it. */
TEST(paths_are_not_cut) {
  static char cut[512];
  memcpy(cut, path, sizeof cut - 1);
  leave(AT_FDCWD, cut, "ours");
  job_tell("state", "long", 4);
  CHECK(strcmp(content("7.state"), "long") == 0);
  int file = open(cut, O_RDONLY);
  CHECK_EQUAL(read(file, text, sizeof text), 4);
  CHECK(strncmp(text, "ours", 4) == 0);
  close(file);
  CHECK_EQUAL(unlink(cut), 0);
}

TEST(links_are_not_followed) {
  ring();
  leave(in, "victim", "ours");
  FOR_VALUES (string, name, "7.report", "7.report.draft") CHECK_EQUAL(symlinkat("victim", in, *name), 0);
  job_tell("report", "told", 4);
  CHECK(strcmp(content("7.report"), "told") == 0);
  CHECK(strcmp(content("victim"), "ours") == 0);
}

/* The last one: takes all away. */
TEST(nothing_happens_without_the_folder) {
  FOR_VALUES (string, name, "7.state", "7.report", "ask", "victim", "bell") unlinkat(in, *name, 0);
  for (int part = 0; part < PARTS; part++) {
    CHECK_EQUAL(rmdir(path), 0);
    path[strlen(path) - PART - 1] = '\0';
  }
  CHECK_EQUAL(rmdir(base), 0);
  job_tell("state", "told", 4);
  CHECK(strcmp(asked(), "") == 0);
  close(in);
}
