/* What the parts of the core share: the runtime's state, a communicator, an operation, a call, an ABI of MPI.
 *
 * The folder mpi/ is compiled once for each header of mpi/abi/. MPI handles leave it as intptr_t, which is wide enough
 * for every ABI. Nothing here knows Python.
 *
 * Errors: a state that only a bug of ours can cause is asserted in the tests. A state that a user or a runtime can
 * cause is always checked and becomes an ffi_error, which the caller of jaxmpi sees as a Python exception. Nothing
 * aborts.
 *
 * Threads: what changes the registry or fills a table (registry_begin, registry_add, registry_reserve, reduction_add,
 * abi_find, symbols_load) is called under the GIL. Any thread may call the rest. No function here takes a lock; those
 * of struct abi that call MPI need runtime.lock where `serialize` is set: see there.
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

#include "base/memory.h"
#include "base/ffi.h"

/* Limits: XLA's type codes; attributes and buffer roles of an operation; buffers of one call. */
enum { DTYPE_CODES = 40, MAX_ATTRIBUTES = 7, MAX_ROLES = 6, MAX_BUFFERS = 256 };
/* Bytes: the smallest chunk that may be set; the smallest part of a chunk that belongs to one rank. */
enum { LEAST_CHUNK = 4096, LEAST_COLUMN = 1 << 14 };
/* Pieces of the shortest allreduce that is divided. */
enum { PIECES = 4 };

/* The objects that compiled programs refer to by number: communicators, reductions, plans, statuses and texts. A
 * program may outlive its process, in a cache of compiled code or in a file, and must not find another object under its
 * number in another process. So a number consists of a place, in the low PLACE_BITS bits, and above it a key, which
 * must equal the key of the object at that place: 63 bits together, never negative, never 0.
 *
 * The key of an object with a `meaning` is a hash of it: a text that tells the object from all others in every run of a
 * program. If such objects are also added in the same order in each run, their numbers are the same, and programs of an
 * earlier run find them. All other objects have the key of this process.
 *
 * Objects are never removed. Adding needs the GIL; any thread may look up, without a lock. */
enum { PLACE_BITS = 24, KEY_BITS = 39 };
void registry_begin(uint64_t key); /* this process's key, random; called before anything is added */
int64_t registry_add(void *object, const char *meaning); /* its number; 0: out of memory. `meaning` may be NULL */
int64_t registry_reserve(const char *meaning);           /* the number of an object to be added with this meaning */
void *registry_at(int64_t number);                       /* NULL: no object has this number */

/* An intra-communicator. Made once per communicator and never freed, so that a program compiled for a communicator that
 * has since been freed finds `freed` set, rather than a new communicator with a recycled handle. */
struct communicator {
  int64_t number; /* in the registry */
  intptr_t handle;
  int rank;
  int size;
  int64_t chunk; /* bytes of a chunk: longer operations are divided if they can be; 0: never. The same on all ranks */
  int64_t piece; /* bytes of a piece of an allreduce that is at least PIECES times as long; 0: never. As `chunk` */
  const char *_Atomic name; /* for reports; NULL: none */
  atomic_bool freed;
  struct communicator *next_freed;     /* in runtime.freed */
  atomic_int_least64_t to_compare;     /* collectives that are still to be compared: compare.h */
  atomic_uint_least64_t compared;      /* collectives compared so far */
  int64_t history;                     /* a hash of them, */
  int in_vain;                         /* and how many in a row have had no answer in time */
  struct agreement *_Atomic agreement; /* agreement.h; NULL: its ranks cannot be asked */
  atomic_uint_least64_t planned;       /* calls with a plan so far: plan.h */
  atomic_int queued;                   /* posted receives and unexpected messages: requests/queue.h */
};

/* Which thread calls MPI for arrays of a device that are staged: copied through host memory. */
enum transport {
  TRANSPORT_CALLBACK, /* the driver's callback thread, in stream order; not for an MPI library that calls the driver */
  TRANSPORT_THREAD,   /* a thread of ours, for which the callback waits; MPI's driver calls there must not wait for a
                         stream */
  TRANSPORT_WAIT, /* the thread that enqueues the work, once the stream has got there; all threads except the one that
                     imported the package always use it: see transport.h */
};

/* Who combines two elements. The user's function may be written in Python. */
enum reducer { REDUCER_USER, REDUCER_OURS, REDUCER_MPI };

/* A reduction, an MPI_Op. Made once and never freed, like communicators. */
struct reduction {
  int64_t number; /* in the registry */
  intptr_t handle;
  enum reducer by;
  const void *users; /* the handle in the user's own object, which changes as that is freed; NULL: not a user's */
  int width;         /* of that handle, in bytes */
  char name[];
};

/* Whether the user has freed it. */
static inline bool reduction_is_freed(const struct reduction *reduction) {
  if (reduction->users == NULL) return false;
  if (reduction->width == 4) return *(const int32_t *)reduction->users != (int32_t)reduction->handle;
  return *(const intptr_t *)reduction->users != reduction->handle;
}

/* NULL: out of memory. The number of a reduction by MPI or by us has a key made of its name: the same in each run. */
struct reduction *reduction_add(intptr_t handle, enum reducer by, const char *name);

/* Ranks of COMM_WORLD, and the handle of their communicator once the body of `connect` has made it. */
struct group {
  intptr_t handle;
  int size;
  int ranks[];
};

/* An error of an operation that was executed after its call had returned: the next operation raises it. */
struct failure {
  enum ffi_error_code code;
  char text[];
};

/* All mutable state except the registry. Members that are not atomic are written before the first call, or by a test
 * between two calls, and read by all threads. */
struct runtime {
  const struct abi *abi;           /* the copy for the loaded library; NULL before loading */
  intptr_t datatypes[DTYPE_CODES]; /* MPI handle by XLA's code; valid where `known` */
  bool known[DTYPE_CODES];
  int most_tag;      /* the highest tag of a message */
  int64_t max_count; /* elements that one MPI call may be given; INT_MAX except in tests */
  bool unmarked;     /* the ends of what MPI fills are not marked (mpi/collectives.c); only in tests */
  /* COMM_SELF: freed as MPI_Finalize begins, or in a child of fork; NULL before configuration. */
  struct communicator *self;
  const char *ended;          /* why nothing can be communicated once `self` has been freed */
  struct communicator *world; /* COMM_WORLD; NULL before configuration */
  int rank;                   /* in COMM_WORLD, for the log */
  bool serialize;             /* MPI_THREAD_SERIALIZED: one MPI call at a time, under `lock` */
  pthread_mutex_t lock;
  atomic_long failures; /* operations that have failed so far: a call during which this grows checks its link: link.c */
  struct communicator *_Atomic freed;           /* those that have been freed since Python asked */
  struct failure *_Atomic deferred;             /* the first error not yet reported */
  struct reduction *reductions[DTYPE_CODES][4]; /* SUM, PROD, MAX, MIN: for JAX's sharded programs; NULL: none */
  void *library;                                /* MPI, from dlopen */
  bool aware;                                   /* MPI accepts device pointers */
  int64_t copy_bytes;       /* that a device copies in the time in which a copy begins; 0: boxes.c copies what it can */
  enum transport transport; /* for what is staged: everything if MPI is not aware */
  atomic_bool several_devices; /* a link may be committed to one of them: link.c */
  atomic_bool check;           /* ranks compare all their collectives (compare.h); the same on all ranks */
  intptr_t channel;            /* a duplicate of COMM_WORLD for agreement.h; 0: none */
  atomic_bool several_threads; /* of the program communicate */
  struct agreement *_Atomic agreements;
  atomic_bool labels;                /* and no rank has arrays on devices: messages have labels */
  atomic_bool ends_on_error;         /* an operation that fails ends the job, rather than raise: */
  void (*abort)(const char *reason); /* with a reason in one line; job_end */
  atomic_bool log;                   /* a line at the start and at the end of each operation */
  atomic_uint_least64_t calls;       /* numbers the logged calls */
};
extern struct runtime runtime;

/* Seconds of a clock that is never set. */
static inline double seconds_now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Whether MPI has been finalized, or this is a child of fork: why is `runtime.ended`. */
static inline bool runtime_has_ended(void) {
  return runtime.self != NULL && atomic_load_explicit(&runtime.self->freed, memory_order_relaxed);
}

/* Whether this thread imported the package: see transport.h. */
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

/* What a buffer is for. READ and WRITE: MPI gets a pointer to it, in whichever memory it lies. HOST_READ and
 * HOST_WRITE: the core itself reads or writes it, always on the host: truth values to check, or numbers that a call
 * passes as an array. */
enum role { READ, WRITE, HOST_READ, HOST_WRITE };
static inline bool role_is_written(enum role role) { return (role & 1) != 0; }
static inline bool role_is_of_host(enum role role) { return (role & 2) != 0; }

enum divisibility { WHOLE, CHUNKS, GATHERS, SCATTERS, EXCHANGES }; /* see ops.def */

/* What an attribute is: RANK and TAG are numbers that errors show, DERIVATIVE, ADJOINT, LEAF, NUMBER and PLAIN see
 * ops.def, the others the number of an object in the registry. */
enum attribute { RANK, TAG, DERIVATIVE, ADJOINT, LEAF, NUMBER, PLAIN, OBJECT, OBJECT_OR_0, REDUCTION, PLAN };
static inline bool attribute_is_object(enum attribute kind) { return kind >= OBJECT; }

/* About what a RANK or TAG is, in a program, that is known at run time only. That of a derivative is TRACED plus the
 * first tag of derivatives, which is to be added to the tag, or plus 1 for a rank. */
#define TRACED (-(INT64_C(1) << 40))
static inline bool is_traced(int64_t attribute) { return attribute < TRACED / 2; }

/* What a collective is of, by the numbers of _DERIVATIVES in python/jaxmpi/_primitive/primitive.py; from OF_COTANGENT
 * on it may be of reverse mode. */
enum derivative { OF_VALUE, OF_TANGENT, OF_COTANGENT, OF_FURTHER };

/* In words, what a collective is of; NULL for a number that is none of an attribute DERIVATIVE. */
const char *derivative_name(int64_t derivative);

/* A row of ops.def. */
struct operation {
  const char *id;   /* its name there, for handlers and in Python, */
  const char *name; /* and the one that users know */
  int row;
  enum divisibility divisibility;
  int buffer_count, attribute_count;
  int comm; /* index of this attribute */
  struct {
    short fixed;   /* buffers that are read ([0]) or written ([1]), without lists */
    short of_host; /* how many are passed if none of MPI's are; -1: MPI's always are, or there is an EACH */
    bool list;     /* whether there is an EACH, JOINED or PARTLY, */
    bool joined;   /* and whether it is one of the latter two: of at least one buffer */
  } passed[2];
  struct {
    const char *name;
    enum role role;
    bool each;   /* any number of buffers, one after the other, */
    bool joined; /* which the body gets as one */
  } buffers[MAX_ROLES];
  struct {
    const char *name;
    enum attribute kind;
  } attributes[MAX_ATTRIBUTES];
};
extern const struct operation operation_table[]; /* ends with a NULL id */

/* Index of the last attribute of this kind; -1: there is none. */
static inline int attribute_of(const struct operation *operation, enum attribute kind) {
  int i = operation->attribute_count - 1;
  while (i >= 0 && operation->attributes[i].kind != kind) i--;
  return i;
}
/* Whether it starts something, or waits for that: requests.h. */
static inline bool has_request(const struct operation *operation) {
  for (int i = 0; i < operation->buffer_count; i++)
    if (strcmp(operation->buffers[i].name, "request") == 0) return true;
  return false;
}

enum {
#define OPERATION(name, divisibility, buffers, attributes) ROW_##name,
#include "core/ops.def"
#undef OPERATION
  OPERATION_COUNT
};

/* Whether an operation waits for what has been started. */
static inline bool waits_for_request(int row) { return row == ROW_wait || row == ROW_exchange_finish; }

/* What this rank passes to an operation or receives from it. Whoever uses the buffer by its role (MPI or the core) can
 * dereference `data`, in whichever memory it lies. `data`, `count` and `type` are zero where this rank passes no such
 * buffer. */
struct buffer {
  void *data;
  int64_t count;
  const struct datatype *type;
  enum role role;
};

/* The element at `index`. An empty buffer may be at NULL, to which C forbids adding even 0. */
static inline void *buffer_at(const struct buffer *buffer, int64_t index) {
  return index == 0 ? buffer->data : (char *)buffer->data + (size_t)index * buffer->type->bytes;
}

static inline size_t buffer_bytes(const struct buffer *buffer) {
  return buffer->count == 0 ? 0 : (size_t)buffer->count * buffer->type->bytes;
}

/* How a call is divided into MPI calls. Each of MPI's buffers is a matrix with one row, or with one row per rank; a
 * chunk is a range of columns, the same in all of MPI's buffers. */
struct division {
  int64_t columns, chunk;      /* in all, and per chunk; chunk >= columns: a single chunk */
  int rows_read, rows_written; /* of buffers of these roles */
};
static inline bool division_is_one(const struct division *division) { return division->columns <= division->chunk; }

/* One call of an operation, from the frame to the body. Copied by call_copy, since most of `buffers` is unused. */
struct call {
  const ffi_frame *frame; /* NULL after the handler has returned: an error is then deferred */
  const struct operation *operation;
  struct communicator *comm;
  const struct memory *memory; /* that MPI's buffers lie in */
  void *stream;                /* XLA's; NULL for the host */
  char *messages;              /* of a plan: where the transport composes them and takes them apart; NULL otherwise */
  const struct call *leaves;   /* of a call with joined buffers: as XLA made it; NULL otherwise */
  const char *function;        /* MPI function, for errors and the log */
  struct division division;
  int64_t share; /* if compared: elements of this rank's share, over all chunks, and their type */
  const struct datatype *share_type;
  bool share_written;   /* it is what this rank receives */
  enum reducer reducer; /* REDUCER_MPI if the operation is not a reduction */
  bool compared;        /* with the calls of other ranks, before anything is sent: compare.h */
  bool labelled;        /* if a message: what it consists of goes along */
  bool sending;         /* a message of this rank's is under way, which must be received before the call returns */
  bool logged;
  bool ends; /* ranks and tags are still to be read from the last buffer */
  /* For the timeline: sender and tag of the message that was received; `from` is -1 without one. And what has been
   * started, or waited for; 0 without one. */
  int from, from_tag;
  int64_t request;
  uint64_t number; /* if logged */
  struct timespec start;
  int64_t attributes[MAX_ATTRIBUTES]; /* the number of an object is replaced by its address: see object_of */
  /* Row i of the operation's buffers has buffers[first[i]] to buffers[first[i + 1] - 1]. */
  short first[MAX_ROLES + 1];
  short buffer_count;
  struct buffer buffers[MAX_BUFFERS];
};

/* Copies the part of a call that is in use. */
static inline void call_copy(struct call *to, const struct call *from) {
  memcpy(to, from, offsetof(struct call, buffers) + (size_t)from->buffer_count * sizeof *from->buffers);
}

/* The leaves of a joined buffer. */
static inline const struct buffer *leaves_of(const struct call *call, int buffer, int *count) {
  const struct call *leaves = call->leaves;
  *count = leaves->first[buffer + 1] - leaves->first[buffer];
  return &leaves->buffers[leaves->first[buffer]];
}

/* The object that an attribute refers to; NULL if none. */
static inline void *object_of(int64_t attribute) { return (void *)(intptr_t)attribute; }

struct request;
struct receive;
struct message_found;

/* What is compiled once for each ABI. With runtime.serialize the caller of a body, of `communicator` and of what
 * agreement.h needs holds runtime.lock. */
struct abi {
  const char *name;

  /* The bodies of the operations, in the order of ops.def, which call MPI: NULL or the error. Called by the thread that
   * the transport chooses for MPI calls, without the GIL. */
  ffi_error *(*const *bodies)(struct call *call);

  /* Fills the function table from `library` (from dlopen). NULL, or the name of a missing function. Called once, at
   * import. */
  const char *(*load)(void *library);

  /* Finds or makes the struct for a communicator: NULL for an inter-communicator. A new struct gets a number with this
   * meaning, which may be NULL. Returns an MPI error code. Called under the GIL. */
  int (*communicator)(intptr_t handle, const char *meaning, struct communicator **result);

  /* Makes the reductions of a dtype that are ours: `handles` in the order SUM, PROD, MAX, MIN, 0 where MPI's is used.
   * Returns an MPI error code. Called at import, under the GIL. */
  int (*own_operations)(const char *dtype, intptr_t handles[4]);

  /* For agreement.h, all of which return an MPI error code and do not wait: posts a message to, or from, a rank of
   * COMM_WORLD on runtime.channel; tells whether it is through; takes a receive back. */
  int (*post)(void *data, size_t bytes, bool sends, int rank, int tag, intptr_t *request);
  int (*test)(intptr_t *request, bool *done);
  int (*cancel)(intptr_t *request);

  /* Begins to send what a call of `send` passes, which must stay until the body of `wait` is done with the request.
   * Returns an MPI error code. */
  int (*start_send)(const struct call *call, intptr_t *request);

  /* For requests/queue.h, under its lock. Looks whether a message has come (`probe`), and matches it (`match`); both
   * return an MPI error code and do not wait. Begins to receive a message that has been matched, unless a thread waits
   * for it or must look at it first. */
  int (*probe)(const struct communicator *comm, int source, int tag, bool *there, struct message_found *found);
  int (*match)(const struct communicator *comm, int source, int tag, bool *there, struct message_found *found);
  void (*receive)(struct receive *receive);

  /* Whether what a request has begun is still under way. Does not wait; under the lock of requests/table.h. */
  bool (*test_request)(struct request *request);

  /* Ends the job. Any thread. */
  void (*abort)(int status);

  /* The numbers for any rank, any tag and no rank. */
  int any_source, any_tag, proc_null;

  /* The library's text for an error code; `text` has room for 1024 bytes. Any thread. */
  void (*error_text)(int code, char *text);
};
extern const struct abi abi_openmpi, abi_mpich, abi_mpiabi;

/* The ABI of the MPI library behind `library`, by the ABI version and the description that the library returns; NULL if
 * unknown. `version` receives the description, cut to `size`. */
const struct abi *abi_find(void *library, char *version, size_t size);

/* A function to look up in a library; its address is stored at `offset` in a structure. */
struct symbol {
  const char *name; /* NULL at the end of a list */
  size_t offset;
  bool required;
};

/* Fills `table`, with NULL for a missing function. Returns the name of the first missing function that is required, or
 * NULL. */
const char *symbols_load(void *library, const struct symbol *symbols, void *table);

#endif
