/* The state of this process: the MPI library, and how the core uses it.
 *
 * Errors: a state that only a bug of ours can cause is asserted in the tests. A state that a user or a runtime can
 * cause is always checked and becomes an ffi_error, which the caller of jaxmpi sees as a Python exception. Nothing
 * aborts.
 *
 * Threads: members of `runtime` that are not atomic are written under the GIL before the first call, or by a test
 * between two calls, and read by all threads. No function takes a lock. */
#ifndef JAXMPI_RUNTIME_H
#define JAXMPI_RUNTIME_H

#include <pthread.h>
#include <time.h>

#include "base/ffi.h"
#include "core/objects.h"
#include "core/operation.h"

/* The thread that calls MPI for arrays of a device that are staged: copied through host memory. */
enum transport {
  TRANSPORT_CALLBACK, /* the driver's callback thread, in stream order; not for an MPI library that calls the driver */
  TRANSPORT_FLAGS,    /* a thread of ours, for which the stream waits by a value in memory (devices/jobs.h); MPI's
                         driver calls there must not wait for a stream. Where the device cannot wait: a callback */
  TRANSPORT_WAIT, /* the thread that enqueues the work, once the stream has got there; all threads except the one that
                     imported the package always use it: see transport.h */
};

/* An error of an operation that was executed after its call had returned: the next operation raises it. */
struct failure {
  enum ffi_error_code code;
  char text[];
};

struct abi;
struct call;
struct agreement;

/* All mutable state that several parts share, except the registry. */
struct runtime {
  const struct abi *abi;           /* the copy for the loaded library; NULL before loading */
  intptr_t datatypes[DTYPE_CODES]; /* MPI handle by XLA's code; valid where `known` */
  bool known[DTYPE_CODES];
  int most_tag; /* the highest tag of a message */
  /* MPI's classes of errors by which it reports that a process has died; 0: it does not report this. */
  int failed, pending, revoked;
  int64_t max_count; /* the most elements for one MPI call; INT_MAX except in tests */
  bool unmarked;     /* the ends of buffers that MPI fills are not marked (mpi/collectives.c); only in tests */
  /* COMM_SELF: freed when MPI_Finalize begins, or in a child of fork; NULL before configuration. */
  struct communicator *self;
  const char *ended;          /* why nothing can be communicated once `self` has been freed */
  struct communicator *world; /* COMM_WORLD; NULL before configuration */
  int rank;                   /* in COMM_WORLD, for the log */
  bool serialize;             /* MPI_THREAD_SERIALIZED: one MPI call at a time, under `lock` */
  pthread_mutex_t lock;
  atomic_long failures; /* operations that have failed so far: a call during which this grows checks its link:
                           runtime_token.c */
  struct communicator *_Atomic freed;           /* communicators that have been freed since Python asked */
  struct failure *_Atomic deferred;             /* the first error not yet reported */
  struct reduction *reductions[DTYPE_CODES][4]; /* SUM, PROD, MAX, MIN: for JAX's sharded programs; NULL: none */
  void *library;                                /* MPI, from dlopen */
  bool aware;                                   /* MPI accepts device pointers */
  enum transport transport;                     /* for staged arrays: all arrays if MPI is not aware */
  bool flags_asked;                             /* the user wants TRANSPORT_FLAGS, and no callback instead */
  atomic_bool several_devices;                  /* a link may be committed to one of them: runtime_token.c */
  atomic_bool check;           /* ranks compare all their collectives (compare.h); the same on all ranks */
  int64_t channel;             /* the handle of a duplicate of COMM_WORLD for agreement.h; 0: none */
  atomic_bool several_threads; /* of the program communicate */
  struct agreement *_Atomic agreements;
  ffi_error *(*enqueue)(struct call *call); /* by NCCL: devices/nccl.h; NULL: it has not been loaded */
  atomic_bool labels;                       /* and no rank has arrays on devices: messages have labels */
  atomic_bool ends_on_error;                /* an operation that fails ends the job, and does not raise: */
  void (*abort)(const char *reason);        /* with a reason in one line; job_end */
  atomic_bool log;                          /* a line at the start and at the end of each operation */
  atomic_uint_least64_t calls;              /* numbers the logged calls */
};
extern struct runtime runtime;

/* Seconds of a clock that is never set. */
static inline double seconds_now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Return whether MPI has been finalized, or this is a child of fork: why is `runtime.ended`. */
static inline bool runtime_has_ended(void) {
  return runtime.self != NULL && atomic_load_explicit(&runtime.self->freed, memory_order_relaxed);
}

/* Whether this thread imported the package: see transport.h. */
extern _Thread_local bool importer;

#endif
