/* Files that nobody else can have put there: which folders are refused, and that nothing there is overwritten. */
#include "core/private.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "harness.h"

static char path[] = "/tmp/jaxmpi-private-XXXXXX";

static int opened(mode_t mode, const char **reason) {
  static bool made;
  *reason = NULL;
  if (!made && mkdtemp(path) == NULL) abort();
  made = true;
  CHECK_EQUAL(chmod(path, mode), 0);
  return private_folder(path, reason);
}

/* The folder as it is usual. */
static int usual(void) {
  const char *reason;
  int folder = opened(0700, &reason);
  CHECK(folder >= 0);
  return folder;
}

static bool says(const char *reason, const char *text) { return reason != NULL && strstr(reason, text) != NULL; }

static void refused(int result, int error) {
  CHECK_EQUAL(errno, error);
  CHECK_EQUAL(result, -1);
}

/* The number that the next descriptor gets: what is refused is closed. */
static int next_descriptor(void) {
  int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(next);
  return next;
}

TEST(folders_of_others_are_refused) {
  const char *reason;
  const int next = next_descriptor();
  FOR_VALUES (mode_t, mode, 0700, 0755, 0775, 01777) {
    int folder = opened(*mode, &reason);
    CHECK(folder >= 0 && reason == NULL);
    CHECK((fcntl(folder, F_GETFD) & FD_CLOEXEC) != 0);
    close(folder);
  }
  refused(opened(0777, &reason), EPERM);
  CHECK(says(reason, "everyone may replace files in it"));
  if (geteuid() == 0) {
    CHECK_EQUAL(chown(path, 12345, 0), 0);
    refused(opened(0755, &reason), EPERM);
    CHECK(says(reason, "belongs to another user"));
    CHECK_EQUAL(chown(path, 0, 0), 0);
  }
  CHECK_EQUAL(next_descriptor(), next);
}

/* Of a user who is not root. */
TEST(folders_of_root_are_trusted) {
  const char *reason;
  if (geteuid() != 0) return;
  close(usual());
  CHECK_EQUAL(chmod(path, 0755), 0);
  pid_t child = fork();
  if (child == 0) {
    bool right = setuid(12345) == 0 && private_folder(path, &reason) >= 0 && private_folder("/", &reason) >= 0;
    _exit(right ? 0 : 1);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK_EQUAL(status, 0);
}

TEST(no_folders) {
  const char *reason = "";
  refused(private_folder("/no/such/folder", &reason), ENOENT);
  CHECK(strcmp(reason, strerror(ENOENT)) == 0);
  refused(private_folder("/dev/null", &reason), ENOTDIR);
}

TEST(files_are_new) {
  int folder = usual();
  const mode_t mask = umask(022);
  int file = private_create(folder, "file", 0666);
  umask(mask);
  struct stat status;
  CHECK(file >= 0 && fstat(file, &status) == 0);
  CHECK_EQUAL(status.st_mode & 07777, 0644);
  CHECK((fcntl(file, F_GETFL) & O_APPEND) != 0);
  CHECK((fcntl(file, F_GETFD) & FD_CLOEXEC) != 0);
  CHECK_EQUAL(write(file, "first", 5), 5);
  close(file);
  refused(private_create(folder, "file", 0600), EEXIST);
  CHECK(fstatat(folder, "file", &status, 0) == 0 && status.st_size == 5);
  CHECK_EQUAL(unlinkat(folder, "file", 0), 0);
  close(folder);
}

TEST(links_are_not_followed) {
  int folder = usual();
  FOR_VALUES (string, target, "nowhere", "/dev/null", ".") {
    CHECK_EQUAL(symlinkat(*target, folder, "link"), 0);
    refused(private_create(folder, "link", 0600), EEXIST);
    CHECK_EQUAL(unlinkat(folder, "link", 0), 0);
  }
  CHECK_EQUAL(faccessat(folder, "nowhere", F_OK, 0), -1);
  close(folder);
}

TEST(names_are_of_files_alone) {
  int folder = usual();
  FOR_VALUES (string, name, "", "../file", "/tmp/file", "a/b") {
    refused(private_create(folder, *name, 0600), EINVAL);
  }
  CHECK_EQUAL(private_create(folder, "..", 0600), -1);
  close(folder);
}

/* No path is cut: the folder is the one at its very end, and not one above. */
TEST(paths_may_be_long) {
  enum { LONGEST = 4000 };
  static char long_path[LONGEST + 10];
  const char *reason = "";
  int outer = usual();
  CHECK_EQUAL(mkdirat(outer, "end", 0700), 0);
  struct stat end, found;
  CHECK_EQUAL(fstatat(outer, "end", &end, 0), 0);
  FOR_VALUES (size_t, most, 500, 511, 512, 1023, 1024, 2047, 2048, LONGEST) {
    size_t length = (size_t)snprintf(long_path, sizeof long_path, "%s", path);
    while (length < *most) length += (size_t)snprintf(long_path + length, 3, "/.");
    snprintf(long_path + length, sizeof long_path - length, "/end");
    int folder = private_folder(long_path, &reason);
    CHECK(folder >= 0 && fstat(folder, &found) == 0 && found.st_ino == end.st_ino);
    close(folder);
  }
  CHECK_EQUAL(unlinkat(outer, "end", AT_REMOVEDIR), 0);
  close(outer);
}

/* The folder is the one that was opened, wherever its path leads now. */
TEST(paths_may_lead_elsewhere) {
  static char moved[sizeof path + 6];
  int folder = usual();
  snprintf(moved, sizeof moved, "%s-moved", path);
  CHECK_EQUAL(rename(path, moved), 0);
  CHECK_EQUAL(symlink("/tmp", path), 0);
  close(private_create(folder, "file", 0600));
  CHECK_EQUAL(faccessat(folder, "file", F_OK, 0), 0);
  CHECK_EQUAL(unlinkat(folder, "file", 0), 0);
  close(folder);
  CHECK(unlink(path) == 0 && rmdir(moved) == 0);
}
