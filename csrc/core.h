/* What the parts of the core share: the running state, a communicator, a call on its way, a backend.
 *
 * A backend is one copy of mpi_table.c, half.c and ops.c, compiled against one header of abi/. Handles cross its
 * border as intptr_t, wide enough for each ABI. Nothing here knows Python.
 *
 * Errors: what only a mistake of ours can cause is asserted in the tests; what a user can cause, or a runtime, is
 * always checked and becomes an ffi_error, which the caller of jaxmpi sees as a Python exception. Nothing aborts.
 */
#ifndef JAXMPI_CORE_H
#define JAXMPI_CORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "ffi.h"
#include "memory.h"

enum { DTYPE_CODES = 40, MAX_ATTRIBUTES = 6, LEAST_PIECE = 4096, LEAST_COLUMN = 1 << 14 };

/* What compiled programs refer to: communicators, reductions, statuses and texts, by number. A program may outlive its
 * process, in a cache of compiled code or a file, and in another process must not find another object under its number.
 * So a number is a place, in the low PLACE_BITS bits, and above it a key, which the object in that place must have here
 * too: 63 bits together, never negative, never 0.
 *
 * The key of an object with a `meaning` is made of that: of what tells it from all others in each run of a program. If
 * it is also added in the same order in each run, its number is the same, and programs of an earlier run find it. All
 * other objects have the key of this process.
 *
 * Objects are never taken out again. Adding is done under the GIL, looking up by any thread. */
enum { PLACE_BITS = 24, KEY_BITS = 39 };
void registry_begin(uint64_t key);                       /* of this process, random; before anything is added */
int64_t registry_add(void *object, const char *meaning); /* its number; 0 where there is no memory. NULL: no meaning */
int64_t registry_reserve(const char *meaning);           /* the number of what will be added with this meaning */
void *registry_at(int64_t number);                       /* NULL where there is none, or another */

/* An intra-communicator. It is made once per communicator and never given back, so that a program compiled for a
 * communicator that has been freed finds `freed` set, and not the next communicator with a recycled handle. */
struct communicator {
  int64_t number; /* in the registry */
  intptr_t handle;
  struct communicator *self; /* COMM_SELF: freed as MPI_Finalize begins; NULL before configuration */
  int rank;
  int size;
  int64_t piece; /* bytes above which what may go in pieces does; 0: never. The same on all its ranks */
  atomic_bool freed;
  atomic_uint_least64_t compared; /* collectives so far, in the mode JAXMPI_CHECK: compare.h */
};

/* How arrays in a device's memory reach MPI where they are copied through host memory: which thread calls MPI. */
enum road {
  ROAD_CALLBACK, /* the driver's own, in the order of the stream: not for an MPI library that calls the driver */
  ROAD_THREAD,   /* one of ours, for which the driver's waits: its calls of the driver must wait for no stream */
  ROAD_WAIT,     /* the one that gives work to the stream, after it has waited for the stream; so do all threads but the
                    one that has imported the package: see device.h */
};

/* Who combines two elements. The user's function may be one in Python. */
enum reducer { REDUCER_USER, REDUCER_OURS, REDUCER_MPI };

/* A reduction, an MPI_Op. Made once and never given back, as communicators. */
struct reduction {
  int64_t number; /* in the registry */
  intptr_t handle;
  enum reducer by;
  char name[];
};

/* NULL where there is no memory. What MPI or we combine has the same number in each run, made of its name. */
struct reduction *reduction_add(intptr_t handle, enum reducer by, const char *name);

/* An error of an operation that was done after its call had returned: the next operation raises it. */
struct failure {
  enum ffi_error_code code;
  char text[];
};

/* The whole mutable state but for the registry. What is not atomic is written before the first call, or by a test
 * between two calls, and read by all threads. */
struct runtime {
  const struct backend *backend;   /* the copy that matches the loaded library; NULL before loading */
  intptr_t datatypes[DTYPE_CODES]; /* MPI handle by XLA's code; valid where `known` */
  bool known[DTYPE_CODES];
  int64_t max_count;         /* elements that one MPI call may be given: INT_MAX but in tests */
  struct communicator *self; /* COMM_SELF: freed as MPI_Finalize begins; NULL before configuration */
  int rank;                  /* in COMM_WORLD, for the trace */
  bool serialize;            /* MPI_THREAD_SERIALIZED: one call at a time, under `lock` */
  pthread_mutex_t lock;
  atomic_long failures; /* of operations so far: a call in whose time there is one looks at its link: link.c */
  struct failure *_Atomic deferred; /* the first one that nobody has been told of */
  void *library;                    /* MPI, a handle of dlopen */
  bool aware;                       /* MPI reads and writes the memory of devices */
  enum road road;                   /* otherwise, and for what it cannot do there */
  atomic_bool several_devices;      /* a link may be bound to one of them: link.c */
  atomic_bool check;                /* ranks compare their collectives: compare.h; the same on all ranks */
  atomic_bool trace;                /* one line as an operation starts and one as it ends */
  atomic_uint_least64_t calls;      /* numbers the traced calls */
};
extern struct runtime runtime;

/* Whether this thread is the one that has imported the package: see device.h. */
extern _Thread_local bool importer;

/* A row of dtype.def. */
struct datatype {
  int code;
  const char *name;
  size_t bytes;
  const char *mpi;
  const char *kind;
};
extern const struct datatype datatype_table[]; /* ends with a NULL name */

/* The row with this code, NULL if there is none. */
const struct datatype *datatype_find(int code);

struct call;

enum division { WHOLE, PIECES, GATHERS, SCATTERS, EXCHANGES, LOCAL }; /* see ops.def */
enum attribute { SHOWN, OBJECT, OBJECT_OR_NONE, DERIVATIVE };         /* shown in errors: a rank or a tag */

/* A row of ops.def. `body` makes the MPI calls; it returns NULL or the error. */
struct operation {
  const char *name;
  ffi_error *(*body)(struct call *call);
  enum division division;
  int attribute_count;
  struct {
    const char *name;
    enum attribute kind;
  } attributes[MAX_ATTRIBUTES];
};

/* What this rank passes to an operation or receives from it: a pointer that MPI may use, whatever memory the buffer
 * lies in. All zero where there is none. */
struct side {
  void *data;
  int64_t count;
  const struct datatype *type;
};

/* The element at `index`. An empty buffer may lie at NULL, to which C lets nothing be added, not even 0. */
static inline void *side_at(const struct side *side, int64_t index) {
  return index == 0 ? side->data : (char *)side->data + (size_t)index * side->type->bytes;
}

/* One call of an operation, from the frame to the body. */
struct call {
  const ffi_frame *frame; /* NULL where XLA no longer waits: an error is then deferred */
  const struct operation *operation;
  struct communicator *comm;
  const struct memory *memory; /* where `in` and `out` lie */
  void *stream;                /* of XLA's; NULL for the host */
  struct side in;              /* its data is only read */
  struct side out;
  int64_t attributes[MAX_ATTRIBUTES]; /* in the place of an object's number its address: see object_of */
  bool compared;                      /* with those of other ranks, before anything of it is sent: compare.h */
  int64_t share;                      /* then: elements of this rank's share, in all pieces */
  bool traced;
  uint64_t number; /* of a traced call */
  struct timespec start;
  const char *function; /* the MPI function, for errors and the trace */
};

/* An object that an attribute refers to; NULL where it is none. */
static inline void *object_of(int64_t attribute) { return (void *)(intptr_t)attribute; }

struct backend {
  const char *name;
  const struct operation *operations;  /* in the order of ops.def */
  ffi_handler *const *const *handlers; /* likewise, a list for each of memory_spaces */

  /* Fills the function table from `library` (a handle of dlopen); NULL, or the name of a missing function. */
  const char *(*load)(void *library);

  /* Finds or makes the struct for a communicator: NULL for an inter-communicator. One that is made gets the number of
   * its meaning, which may be NULL. Returns an MPI error code. One call at a time. */
  int (*communicator)(intptr_t handle, const char *meaning, struct communicator **result);

  /* Makes the reduction operations for a half-precision type: `handles` in the order SUM, PROD, MAX, MIN. */
  int (*half_operations)(bool bfloat16, intptr_t handles[4]);

  /* Hands `bytes` of each rank to all ranks. Returns an MPI error code. */
  int (*exchange)(const struct communicator *comm, const void *mine, void *all, size_t bytes);

  /* The library's text for an error code; `text` holds 1024 bytes. */
  void (*error_text)(int code, char *text);
};
extern const struct backend backend_openmpi, backend_mpich, backend_mpiabi;

/* The backend for the MPI library behind `library`, asked for its ABI version and its name; NULL if it is none we
 * know. `version` receives the library's own description, cut to `size`. */
const struct backend *backend_find(void *library, char *version, size_t size);

/* A function to be looked up in a library: its address goes to `offset` in a structure. */
struct symbol {
  const char *name; /* NULL at the end of a list */
  size_t offset;
  bool required;
};

/* Fills `table`; a function that is not there is NULL. The name of the first one that is required and is not there, or
 * NULL. */
const char *symbols_load(void *library, const struct symbol *symbols, void *table);

#endif
