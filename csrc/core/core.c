#define _GNU_SOURCE
#include "core/core.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct runtime runtime = {
    .most_tag = INT_MAX, .max_count = INT_MAX, .copy_bytes = 1 << 16, .lock = PTHREAD_MUTEX_INITIALIZER};
_Thread_local bool importer;

enum {
#define DATATYPE(code, name, bytes, mpi, kind) TYPE_##name,
#include "core/dtype.def"
#undef DATATYPE
};

const struct datatype datatype_table[] = {
#define DATATYPE(code, name, bytes, mpi, kind) {code, #name, bytes, #mpi, #kind},
#include "core/dtype.def"
#undef DATATYPE
    {0, NULL, 0, NULL, NULL}};

const struct datatype *datatype_find(int code) {
  static const struct datatype *const by_code[DTYPE_CODES] = {
#define DATATYPE(code, name, bytes, mpi, kind) [code] = &datatype_table[TYPE_##name],
#include "core/dtype.def"
#undef DATATYPE
  };
  return code >= 0 && code < DTYPE_CODES ? by_code[code] : NULL;
}

const char *derivative_name(int64_t derivative) {
  static const char *const names[] = {[OF_VALUE] = "a value",
                                      [OF_TANGENT] = "a tangent",
                                      [OF_COTANGENT] = "a cotangent",
                                      [OF_FURTHER] = "a value in a further derivative"};
  return derivative >= 0 && derivative < (int64_t)(sizeof names / sizeof *names) ? names[derivative] : NULL;
}

/* --- the registry --- */

struct entry {
  int64_t number;
  void *_Atomic object; /* NULL: reserved */
};

enum { BLOCK = 1024, BLOCKS = 4096 };
static struct entry *blocks[BLOCKS];
static atomic_int_least64_t registered; /* stored after the entry is complete */
static int64_t process_key;

static inline struct entry *entry_at(int64_t place) { return &blocks[(place - 1) / BLOCK][(place - 1) % BLOCK]; }

/* FNV-1a, folded. */
static int64_t key_of(const char *meaning) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *meaning != '\0'; meaning++) hash = (hash ^ (unsigned char)*meaning) * 0x100000001b3u;
  return (int64_t)((hash ^ hash >> KEY_BITS) & ((1ull << KEY_BITS) - 1));
}

void registry_begin(uint64_t key) { process_key = (int64_t)(key & ((1ull << KEY_BITS) - 1)); }

static int64_t append(void *object, int64_t key) {
  int64_t place = atomic_load(&registered) + 1;
  if (place > (int64_t)BLOCK * BLOCKS) return 0;
  struct entry **block = &blocks[(place - 1) / BLOCK];
  if (*block == NULL && (*block = calloc(BLOCK, sizeof **block)) == NULL) return 0;
  struct entry *entry = entry_at(place);
  entry->number = key << PLACE_BITS | place;
  atomic_store(&entry->object, object);
  atomic_store_explicit(&registered, place, memory_order_release);
  return entry->number;
}

int64_t registry_reserve(const char *meaning) { return append(NULL, key_of(meaning)); }

int64_t registry_add(void *object, const char *meaning) {
  if (meaning == NULL) return append(object, process_key);
  int64_t key = key_of(meaning), last = atomic_load(&registered);
  for (int64_t place = 1; place <= last; place++) {
    struct entry *entry = entry_at(place);
    if (entry->number >> PLACE_BITS != key || atomic_load(&entry->object) != NULL) continue;
    atomic_store_explicit(&entry->object, object, memory_order_release);
    return entry->number;
  }
  return append(object, key);
}

void *registry_at(int64_t number) {
  int64_t place = number & ((1 << PLACE_BITS) - 1);
  if (place < 1 || place > atomic_load_explicit(&registered, memory_order_acquire)) return NULL;
  struct entry *entry = entry_at(place);
  return entry->number == number ? atomic_load_explicit(&entry->object, memory_order_acquire) : NULL;
}

struct reduction *reduction_add(intptr_t handle, enum reducer by, const char *name) {
  struct reduction *made = malloc(sizeof *made + strlen(name) + 1);
  char meaning[64];
  if (made == NULL) return NULL;
  made->handle = handle;
  made->by = by;
  made->users = NULL;
  memcpy(made->name, name, strlen(name) + 1);
  snprintf(meaning, sizeof meaning, "reduction %s", name);
  made->number = registry_add(made, by == REDUCER_USER ? NULL : meaning);
  if (made->number != 0) return made;
  free(made);
  return NULL;
}

/* --- libraries --- */

/* dlsym returns an object pointer, which ISO C does not let us cast to a function pointer. */
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

const struct abi *abi_find(void *library, char *version, size_t size) {
  /* Both have the same prototype in every ABI. The longest description is 8192 bytes (MPICH). */
  int (*get_library_version)(char *, int *);
  int (*get_abi_version)(int *, int *);
  char text[8192] = "";
  int length = 0, major = -1, minor = -1;
  if (!find(library, "MPI_Get_library_version", &get_library_version)) return NULL;
  if (get_library_version(text, &length) != 0) return NULL;
  snprintf(version, size, "%s", text);
  if (find(library, "MPI_Abi_get_version", &get_abi_version) && get_abi_version(&major, &minor) == 0 && major >= 1)
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
