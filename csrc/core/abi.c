#define _GNU_SOURCE
#include "core/abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/symbols.h"

static bool starts_with(const char *text, const char *start) { return strncmp(text, start, strlen(start)) == 0; }

const struct abi *abi_find(void *library, char *version, size_t size) {
  /* Both have the same prototype in every ABI. The longest description is 8192 bytes (MPICH). */
  int (*get_library_version)(char *, int *);
  int (*get_abi_version)(int *, int *);
  char text[8192] = "";
  int length = 0, major = -1, minor = -1;
  if (!symbol_find(library, "MPI_Get_library_version", &get_library_version)) return NULL;
  if (get_library_version(text, &length) != 0) return NULL;
  snprintf(version, size, "%s", text);
  if (symbol_find(library, "MPI_Abi_get_version", &get_abi_version) && get_abi_version(&major, &minor) == 0 &&
      major >= 1)
    return &abi_mpiabi;
  if (starts_with(text, "Open MPI")) return &abi_openmpi;
  if (strstr(text, "MPICH") || starts_with(text, "Intel(R) MPI") || strstr(text, "MVAPICH")) return &abi_mpich;
  Dl_info info; /* an unknown name: the families agree on the numbers in file names */
  void *symbol = dlsym(library, "MPI_Get_library_version");
  if (dladdr(symbol, &info) && info.dli_fname) {
    if (strstr(info.dli_fname, "libmpi.so.40") || strstr(info.dli_fname, "libmpi.40.")) return &abi_openmpi;
    if (strstr(info.dli_fname, "libmpi.so.12") || strstr(info.dli_fname, "libmpi.12.")) return &abi_mpich;
  }
  return NULL;
}
