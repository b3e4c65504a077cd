/* What the parts of the core share: the running state, a communicator, an operation, a call, an ABI of MPI.
 *
 * The folder mpi/ is compiled once for each header of mpi/abi/. Handles cross its border as intptr_t, wide enough for
 * each ABI. Nothing here knows Python.
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
#include <string.h>
#include <time.h>

#include "devices/memory.h"
#include "xla/ffi.h"

/* At most: attributes of an operation, its roles, the buffers that one call brings. */
enum { DTYPE_CODES = 40, MAX_ATTRIBUTES = 6, MAX_ROLES = 6, MAX_BUFFERS = 128 };
enum { LEAST_CHUNK = 4096, LEAST_COLUMN = 1 << 14 };

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
  int rank;
  int size;
  int64_t chunk; /* bytes above which what may go in chunks does; 0: never. The same on all its ranks */
  atomic_bool freed;
  atomic_uint_least64_t compared; /* collectives so far, in the mode JAXMPI_CHECK: compare.h */
};

/* How arrays in a device's memory reach MPI where they are copied through host memory: which thread calls MPI. */
enum transport {
  TRANSPORT_CALLBACK, /* the driver's own, in the order of the stream: not for an MPI library that calls the driver */
  TRANSPORT_THREAD,   /* one of ours, for which the driver's waits: its calls of the driver must wait for no stream */
  TRANSPORT_WAIT, /* the one that gives work to the stream, after it has waited for the stream; so do all threads but
                the one that has imported the package: see transport.h */
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
  const struct abi *abi;           /* the copy that matches the loaded library; NULL before loading */
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
  enum transport transport;         /* otherwise, and for what it cannot do there */
  atomic_bool several_devices;      /* a link may be bound to one of them: link.c */
  atomic_bool check;                /* ranks compare their collectives: compare.h; the same on all ranks */
  atomic_bool trace;                /* one line as an operation starts and one as it ends */
  atomic_uint_least64_t calls;      /* numbers the traced calls */
};
extern struct runtime runtime;

/* Whether this thread is the one that has imported the package: see transport.h. */
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

/* What a buffer is for. MPI gets pointers to those that it reads or writes, wherever they lie. The others are read or
 * written by the core itself, always on the host: truth values to check, and whatever numbers a call brings as an
 * array.
 */
enum role { READ, WRITE, HOST_READ, HOST_WRITE };
static inline bool role_is_written(enum role role) { return (role & 1) != 0; }
static inline bool role_is_of_host(enum role role) { return (role & 2) != 0; }

enum divisibility { WHOLE, CHUNKS, GATHERS, SCATTERS, EXCHANGES }; /* see ops.def */

/* What an attribute is: a number that errors show, or that of an object in the registry. */
enum attribute { RANK, TAG, OBJECT, OBJECT_OR_0, REDUCTION, DERIVATIVE };

/* A row of ops.def. */
struct operation {
  const char *name;
  int row;
  enum divisibility divisibility;
  int buffer_count, attribute_count;
  int comm; /* the place of this attribute */
  struct {
    const char *name;
    enum role role;
    bool each; /* any number of them, one after the other */
  } buffers[MAX_ROLES];
  struct {
    const char *name;
    enum attribute kind;
  } attributes[MAX_ATTRIBUTES];
};
extern const struct operation operation_table[]; /* ends with a NULL name */
enum {
#define OPERATION(name, divisibility, buffers, attributes) ROW_##name,
#include "core/ops.def"
#undef OPERATION
  OPERATION_COUNT
};

/* What this rank passes to an operation or receives from it. `data` is a pointer that the one who uses it by its role
 * can use, whatever memory the buffer lies in. All zero where this rank passes none. */
struct buffer {
  void *data;
  int64_t count;
  const struct datatype *type;
  enum role role;
};

/* The element at `index`. An empty buffer may lie at NULL, to which C lets nothing be added, not even 0. */
static inline void *buffer_at(const struct buffer *buffer, int64_t index) {
  return index == 0 ? buffer->data : (char *)buffer->data + (size_t)index * buffer->type->bytes;
}

static inline size_t buffer_bytes(const struct buffer *buffer) {
  return buffer->count == 0 ? 0 : (size_t)buffer->count * buffer->type->bytes;
}

/* How a call is divided into calls of MPI. A buffer of MPI's is a matrix of one row, or of one for each rank; a chunk
 * is some of its columns, the same ones in all such buffers. */
struct division {
  int64_t columns, chunk;      /* in all, and in a chunk: as many where there is one chunk */
  int rows_read, rows_written; /* of buffers of these roles */
};
static inline bool division_is_one(const struct division *division) { return division->columns <= division->chunk; }

/* One call of an operation, from the frame to the body. The last member is long and mostly unused: call_copy. */
struct call {
  const ffi_frame *frame; /* NULL where XLA no longer waits: an error is then deferred */
  const struct operation *operation;
  struct communicator *comm;
  const struct memory *memory; /* where MPI's buffers lie */
  void *stream;                /* of XLA's; NULL for the host */
  const char *function;        /* of MPI, for errors and the trace */
  struct division division;
  int64_t share;        /* where it is compared: elements of this rank's share, in all chunks */
  enum reducer reducer; /* REDUCER_MPI where the operation is none that reduces */
  bool compared;        /* with those of other ranks, before anything of it is sent: compare.h */
  bool traced;
  uint64_t number; /* of a traced call */
  struct timespec start;
  int64_t attributes[MAX_ATTRIBUTES]; /* in the place of an object's number its address: see object_of */
  /* The buffers of role i of the operation are those from first[i] on, up to first[i + 1]. */
  short first[MAX_ROLES + 1];
  short buffer_count;
  struct buffer buffers[MAX_BUFFERS];
};

/* A copy of as much of a call as is in use. */
static inline void call_copy(struct call *to, const struct call *from) {
  memcpy(to, from, offsetof(struct call, buffers) + (size_t)from->buffer_count * sizeof *from->buffers);
}

/* An object that an attribute refers to; NULL where it is none. */
static inline void *object_of(int64_t attribute) { return (void *)(intptr_t)attribute; }

/* What is compiled once for each ABI. Any thread; calls of MPI under the runtime's lock where MPI wants it. */
struct abi {
  const char *name;

  /* The bodies of the operations, in the order of ops.def: they make the MPI calls; NULL or the error. */
  ffi_error *(*const *bodies)(struct call *call);

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
extern const struct abi abi_openmpi, abi_mpich, abi_mpiabi;

/* The ABI of the MPI library behind `library`, which is asked for its ABI's version and its name; NULL if it is none
 * that we know. `version` receives the library's own description, cut to `size`. */
const struct abi *abi_find(void *library, char *version, size_t size);

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
