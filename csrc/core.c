#define _GNU_SOURCE
#include "core.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct runtime runtime = {.max_count = INT_MAX, .lock = PTHREAD_MUTEX_INITIALIZER};
_Thread_local bool importer;

bool reduction_add(intptr_t handle, enum reducer by) {
  if (runtime.reduction_count == MAX_REDUCTIONS) return false;
  runtime.reductions[runtime.reduction_count].handle = handle;
  runtime.reductions[runtime.reduction_count++].by = by;
  return true;
}

enum {
#define DATATYPE(code, name, bytes, mpi, kind) ROW_##name,
#include "dtype.def"
#undef DATATYPE
  ROWS
};

const struct datatype datatype_table[] = {
#define DATATYPE(code, name, bytes, mpi, kind) {code, #name, bytes, #mpi, #kind},
#include "dtype.def"
#undef DATATYPE
    {0, NULL, 0, NULL, NULL}};

const struct datatype *datatype_find(int code) {
  static const struct datatype *const by_code[DTYPE_CODES] = {
#define DATATYPE(code, name, bytes, mpi, kind) [code] = &datatype_table[ROW_##name],
#include "dtype.def"
#undef DATATYPE
  };
  return code >= 0 && code < DTYPE_CODES ? by_code[code] : NULL;
}

enum { BLOCK = 1024, BLOCKS = 4096 };
static void **blocks[BLOCKS];
static atomic_int_least64_t registered; /* published after the object is in its place */

int64_t registry_add(void *object) {
  int64_t place = atomic_load(&registered);
  if (place >= (int64_t)BLOCK * BLOCKS) return 0;
  void ***block = &blocks[place / BLOCK];
  if (*block == NULL && (*block = calloc(BLOCK, sizeof **block)) == NULL) return 0;
  (*block)[place % BLOCK] = object;
  atomic_store_explicit(&registered, place + 1, memory_order_release);
  return place + 1;
}

void *registry_at(int64_t number) {
  if (number < 1 || number > atomic_load_explicit(&registered, memory_order_acquire)) return NULL;
  return blocks[(number - 1) / BLOCK][(number - 1) % BLOCK];
}

/* dlsym gives an object pointer; POSIX lets it be copied into a function pointer, ISO C only so. */
static bool find(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

const char *symbols_load(void *library, const struct symbol *symbols, void *table) {
  const char *missing = NULL;
  for (; symbols->name != NULL; symbols++)
    if (!find(library, symbols->name, (char *)table + symbols->offset) && symbols->required && missing == NULL)
      missing = symbols->name;
  return missing;
}

static bool starts_with(const char *text, const char *start) { return strncmp(text, start, strlen(start)) == 0; }

const struct backend *backend_find(void *library, char *version, size_t size) {
  /* These two have the same prototype in each ABI. The longest description is 8192 bytes (MPICH). */
  int (*get_library_version)(char *, int *);
  int (*get_abi_version)(int *, int *);
  char text[8192] = "";
  int length = 0, major = -1, minor = -1;
  if (!find(library, "MPI_Get_library_version", &get_library_version)) return NULL;
  if (get_library_version(text, &length) != 0) return NULL;
  snprintf(version, size, "%s", text);
  if (find(library, "MPI_Abi_get_version", &get_abi_version) && get_abi_version(&major, &minor) == 0 && major >= 1)
    return &backend_mpiabi;
  if (starts_with(text, "Open MPI")) return &backend_openmpi;
  if (strstr(text, "MPICH") || starts_with(text, "Intel(R) MPI") || strstr(text, "MVAPICH")) return &backend_mpich;
  Dl_info info; /* a vendor's own name: the soname that its family agreed on decides */
  void *symbol = dlsym(library, "MPI_Get_library_version");
  if (dladdr(symbol, &info) && info.dli_fname) {
    if (strstr(info.dli_fname, "libmpi.so.40")) return &backend_openmpi;
    if (strstr(info.dli_fname, "libmpi.so.12")) return &backend_mpich;
  }
  return NULL;
}
