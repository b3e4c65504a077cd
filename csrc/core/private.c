#include "core/private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Why others could replace files in such a folder; NULL: they could not. */
static const char *fault_of(const struct stat *folder) {
  if (folder->st_uid != geteuid() && folder->st_uid != 0) return "it belongs to another user";
  if ((folder->st_mode & S_IWOTH) != 0 && (folder->st_mode & S_ISVTX) == 0)
    return "everyone may replace files in it (chmod o-w, or +t)";
  return NULL;
}

/* Why it is not ours alone; NULL: it is. */
static const char *fault_of_own(const struct stat *folder) {
  if (folder->st_uid != geteuid()) return "it belongs to another user";
  if ((folder->st_mode & (S_IRWXG | S_IRWXO)) != 0) return "other users may use it";
  return NULL;
}

static int open_checked(const char *path, int flags, const char *(*fault)(const struct stat *), const char **reason) {
  struct stat status;
  int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
  if (folder < 0 || fstat(folder, &status) != 0) {
    int error = errno;
    *reason = strerror(error);
    if (folder >= 0) close(folder);
    errno = error;
    return -1;
  }
  if ((*reason = fault(&status)) == NULL) return folder;
  close(folder);
  errno = EPERM;
  return -1;
}

int private_folder(const char *path, const char **reason) { return open_checked(path, 0, fault_of, reason); }

int private_own_folder(const char *path, const char **reason) {
  return open_checked(path, O_NOFOLLOW, fault_of_own, reason);
}

static bool is_name(const char *name) {
  if (*name != '\0' && strchr(name, '/') == NULL) return true;
  errno = EINVAL;
  return false;
}

int private_create(int folder, const char *name, mode_t mode) {
  if (!is_name(name)) return -1;
  return openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_APPEND | O_CLOEXEC, mode);
}

int private_open(int folder, const char *name) {
  struct stat status;
  if (!is_name(name)) return -1;
  int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return -1;
  if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid()) return file;
  close(file);
  errno = EPERM;
  return -1;
}
