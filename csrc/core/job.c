#include "core/job.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "core/core.h"

enum { FAILED = 1 }; /* the code of a job that ends here */

static const char *folder; /* NULL: none */

void job_begin(void) {
  if (folder == NULL && getenv("JAXMPI_JOB_FOLDER") != NULL) folder = strdup(getenv("JAXMPI_JOB_FOLDER"));
}

bool job_has_folder(void) { return folder != NULL; }

void job_tell(const char *kind, const char *content, size_t length) {
  char path[512], draft[512];
  if (folder == NULL) return;
  snprintf(path, sizeof path, "%s/%d.%s", folder, runtime.rank, kind);
  snprintf(draft, sizeof draft, "%s/%d.%s.draft", folder, runtime.rank, kind);
  int file = open(draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return;
  bool whole = write(file, content, length) == (ssize_t)length;
  close(file);
  if (whole) rename(draft, path);
}

void job_question(char *text, size_t size) {
  char path[512];
  *text = '\0';
  if (folder == NULL) return;
  snprintf(path, sizeof path, "%s/ask", folder);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ssize_t length = read(file, text, size - 1);
  close(file);
  text[length > 0 ? length : 0] = '\0';
}

/* Launchers may lose what is written right before an abort: waits until stderr has been read, for 5 seconds at most,
 * and passed on. */
static void wait_for_launcher(void) {
  int unread = 0;
  for (int i = 0; i < 500 && ioctl(STDERR_FILENO, FIONREAD, &unread) == 0 && unread > 0; i++)
    nanosleep(&(struct timespec){0, 10000000}, NULL);
  nanosleep(&(struct timespec){0, 300000000}, NULL);
}

/* A machine that does not see the launcher's folder has one of its own, whose files are taken away to the launcher. It
 * is to know why the job ends before mpiexec says something about that. */
static void wait_for_relay(void) {
  char path[512];
  snprintf(path, sizeof path, "%s/relayed", folder);
  if (access(path, F_OK) != 0) return;
  snprintf(path, sizeof path, "%s/%d.aborts", folder, runtime.rank);
  for (int i = 0; i < 100 && access(path, F_OK) == 0; i++) nanosleep(&(struct timespec){0, 10000000}, NULL);
}

void job_end(const char *reason) {
  char text[2048];
  wait_for_launcher();
  if (folder != NULL) {
    int length = snprintf(text, sizeof text, "%d\n%s", FAILED, reason);
    job_tell("aborts", text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1);
    wait_for_relay();
  }
  runtime.abi->abort(FAILED);
  _exit(FAILED); /* MPI has been finalized */
}
