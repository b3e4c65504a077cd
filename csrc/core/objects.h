/* The objects of MPI that programs refer to: communicators, reductions, groups.
 *
 * The folder mpi/ is compiled once for each header of mpi/abi/. MPI handles leave it as intptr_t, which is wide enough
 * for every ABI.
 *
 * Threads: reduction_add is called under the GIL. Members that are not atomic are written before the object is in the
 * registry, or under the GIL before it is used; `history` and `in_vain` by the thread that makes a call. */
#ifndef JAXMPI_OBJECTS_H
#define JAXMPI_OBJECTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/registry.h"

/* The bytes of the smallest chunk that may be set. The pieces of the shortest allreduce that is divided. */
enum { LEAST_CHUNK = 4096, PIECES = 4 };

/* An intra-communicator. Made once per communicator and never freed. So a program compiled for a communicator that has
 * since been freed sees `freed`, and not a new communicator with a recycled handle. */
struct communicator {
  int64_t number; /* in the registry */
  intptr_t handle;
  int rank;
  int size;
  /* Bytes of a chunk: longer operations are divided if they can be; 0: never. The same on all ranks. */
  _Atomic int64_t chunk;
  _Atomic int64_t piece;    /* bytes; an allreduce at least PIECES times as long is divided; 0: never. As `chunk` */
  const char *_Atomic name; /* for reports; NULL: none */
  atomic_bool freed;
  atomic_bool given_up;                /* after a process has died: then it counts as freed */
  struct communicator *next_freed;     /* in runtime.freed */
  atomic_int_least64_t to_compare;     /* collectives that are still to be compared: compare.h */
  atomic_uint_least64_t compared;      /* collectives compared so far */
  int64_t history;                     /* a hash of them, */
  int in_vain;                         /* and how many in a row have had no answer in time */
  struct agreement *_Atomic agreement; /* agreement.h; NULL: the ranks of it cannot be asked */
  atomic_uint_least64_t planned;       /* calls with a plan so far: plan.h */
  /* NCCL carries what it can (devices/nccl.h), the same on all ranks; NULL: has not carried a call yet. */
  atomic_bool by_nccl;
  struct nccl *_Atomic nccl;
  atomic_int queued; /* posted receives and unexpected messages: requests/queue.h */
};

/* Whether NCCL carries what it can on a communicator. */
static inline bool comm_is_by_nccl(const struct communicator *comm) {
  return atomic_load_explicit(&comm->by_nccl, memory_order_relaxed);
}

/* The code that combines two elements. The user's function may be written in Python. */
enum reducer { REDUCER_USER, REDUCER_OURS, REDUCER_MPI };

/* Reductions that NCCL has, by NCCL's numbers. */
enum { BASIC_SUM, BASIC_PROD, BASIC_MAX, BASIC_MIN, BASICS };

/* A reduction, an MPI_Op. Made once and never freed, like communicators. */
struct reduction {
  int64_t number; /* in the registry */
  intptr_t handle;
  enum reducer by;
  const void *users; /* the handle in the user's own object, which changes when that is freed; NULL: not a user's */
  int width;         /* of that handle, in bytes */
  int basic;         /* BASIC_SUM to BASIC_MIN; -1: another one, or a user's */
  char name[];
};

/* Return whether the user has freed it. */
static inline bool reduction_is_freed(const struct reduction *reduction) {
  if (reduction->users == NULL) return false;
  if (reduction->width == 4) return *(const int32_t *)reduction->users != (int32_t)reduction->handle;
  return *(const intptr_t *)reduction->users != reduction->handle;
}

/* NULL: out of memory. The number of a reduction by MPI or by us has a key made of the name: the same in each run. */
struct reduction *reduction_add(intptr_t handle, enum reducer by, const char *name);

/* Ranks of COMM_WORLD, and the handle of their communicator once the body of `connect` has made it. */
struct group {
  intptr_t handle;
  int size;
  int ranks[];
};

#endif
