#include "core/private.h"

#include <errno.h>
#include <fcntl.h>
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

int private_folder(const char *path, const char **reason) {
  struct stat status;
  int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0 || fstat(folder, &status) != 0) {
    int error = errno;
    *reason = strerror(error);
    if (folder >= 0) close(folder);
    errno = error;
    return -1;
  }
  if ((*reason = fault_of(&status)) == NULL) return folder;
  close(folder);
  errno = EPERM;
  return -1;
}

int private_create(int folder, const char *name, mode_t mode) {
  if (*name == '\0' || strchr(name, '/') != NULL) {
    errno = EINVAL;
    return -1;
  }
  return openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_APPEND | O_CLOEXEC, mode);
}
