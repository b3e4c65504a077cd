#include "core/job.h"

#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/abi.h"

enum { FAILED = 1 }; /* the code of a job that ends here */

static const char *folder; /* NULL: none */

void job_begin(void) {
  if (folder == NULL && getenv("JAXMPI_JOB_FOLDER") != NULL) folder = strdup(getenv("JAXMPI_JOB_FOLDER"));
}

bool job_has_folder(void) { return folder != NULL; }

/* Its descriptor, or -1. It is not kept: a program may close it, and get its number for something else. */
static int open_folder(void) { return folder != NULL ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1; }

void job_tell(const char *kind, const char *content, size_t length) {
  char name[64], draft[70];
  int in = open_folder();
  if (in < 0) return;
  snprintf(name, sizeof name, "%d.%s", runtime.rank, kind);
  snprintf(draft, sizeof draft, "%s.draft", name);
  unlinkat(in, draft, 0); /* of a write that has failed */
  int file = openat(in, draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file >= 0) {
    bool whole = write(file, content, length) == (ssize_t)length;
    close(file);
    if (whole) renameat(in, draft, in, name);
  }
  close(in);
}

/* Whether the launcher asks: a byte is in a FIFO then, which the launcher alone takes away (folder.py). Of the
 * disk nothing is asked: the descriptor is kept, and made once more if the program has closed it, and may have got its
 * number for something else. */
static bool bell_rings(void) {
  enum { TRIES = 3 };
  static int bell = -1, tries;
  static struct stat ours;
  struct stat found;
  if (bell < 0 || fstat(bell, &found) != 0 || found.st_dev != ours.st_dev || found.st_ino != ours.st_ino) {
    int in = tries++ < TRIES ? open_folder() : -1;
    bell = in >= 0 ? openat(in, "bell", O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (in >= 0) close(in);
    if (bell < 0) return false;
    if (fstat(bell, &ours) != 0 || !S_ISFIFO(ours.st_mode) || ours.st_uid != geteuid()) {
      close(bell);
      bell = -1;
      return false;
    }
  }
  struct pollfd look = {bell, POLLIN, 0};
  return poll(&look, 1, 0) == 1 && (look.revents & POLLIN) != 0;
}

void job_question(char *text, size_t size) {
  *text = '\0';
  if (!bell_rings()) return;
  int in = open_folder();
  if (in < 0) return;
  int file = openat(in, "ask", O_RDONLY | O_CLOEXEC);
  close(in);
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

void job_end(const char *reason) {
  char text[2048];
  wait_for_launcher();
  if (folder != NULL) {
    int length = snprintf(text, sizeof text, "%d\n%s", FAILED, reason);
    job_tell("aborts", text, (size_t)length < sizeof text ? (size_t)length : sizeof text - 1);
  }
  runtime.abi->abort(FAILED);
  _exit(FAILED); /* MPI has been finalized */
}
