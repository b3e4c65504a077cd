/* The comparison of calls: before a collective, the ranks of the communicator compare what they will do (JAXMPI_CHECK).
 *
 * If they differ they would deadlock or compute wrong numbers; so all of them get an error, and nothing is sent. A call
 * is compared once, before the first chunk, by the thread that calls MPI for it. A compared call always takes the
 * transport TRANSPORT_WAIT, so the call itself raises its error.
 *
 * With JAXMPI_CHECK=1 (runtime.check) this holds for all collectives, without end, and a message has a label with its
 * contents. Otherwise it holds for the first collectives of a communicator (`to_compare`), and no correct program may
 * notice. Calls with a plan are left out, because their messages have labels, unless NCCL carries some of them. A start
 * of something does not wait for the other ranks, whose answers come with the wait for it. Other calls wait for the
 * ranks compare_patience at most. A rank that has waited in vain several times compares no more on this communicator,
 * as if the others did not use this library.
 *
 * Threads: the functions run in the thread in which XLA called the handler, without the GIL. compare_decide needs no
 * lock; call_body calls the others, which call MPI, with runtime.lock held where `serialize` is set. */
#ifndef JAXMPI_COMPARE_H
#define JAXMPI_COMPARE_H

#include "core/call.h"
#include "core/runtime.h"

/* A message of the comparison: integers of one size, so that there is no padding. The layout is the same on all ranks.
 */
struct record {
  int64_t call;       /* the number among the collectives on this communicator, from 1 */
  int64_t operation;  /* the row in ops.def; from OPERATION_COUNT on a function there */
  int64_t derivative; /* attribute */
  int64_t reduction;  /* the number in the registry; 0: none; USERS_REDUCTION: not compared */
  int64_t root;       /* -1: none */
  int64_t dtype;      /* XLA's code; -1: there are no buffers */
  int64_t count;      /* elements of a rank's share */
  int64_t arrays;     /* how many arrays, which are joined or have a plan; 0: one, or none */
  int64_t sizes;      /* of the share of each array, as a hash, or the plan's signature; 0: one array, or none */
};
enum { USERS_REDUCTION = 1 };

/* The label in front of a message between two buffers on the host. A message without it is from a rank that calls MPI
 * itself. */
struct label {
  uint64_t magic;  /* LABEL_MAGIC */
  int64_t dtype;   /* XLA's code */
  int64_t count;   /* elements */
  char lines[232]; /* of the program that sends, after "called at "; empty: not known */
};
#define LABEL_MAGIC UINT64_C(0x6a61786d70692d31)

struct label label_of(const struct call *call, const struct buffer *buffer);

/* The label of a message; NULL: it has none. */
const struct label *label_find(const void *message, int64_t bytes);

/* Set `compared`, `labelled` and, if either is set, `share` of a call that is fully decoded. */
void compare_decide(struct call *call);

/* NULL if all ranks make the same call, as far as this rank has heard; otherwise the error, on all of them. */
ffi_error *compare_ranks(struct call *call);

/* Check whether the ranks have started the same on this communicator, in the wait for it: the error if not. `waits`:
 * waits some time for the answer. */
ffi_error *compare_started(const struct call *call, struct communicator *comm, bool waits);

extern double compare_patience; /* seconds; tests change it */

/* Return whether messages have labels with their contents. */
static inline bool has_labels(void) {
  return atomic_load_explicit(&runtime.check, memory_order_relaxed) &&
         atomic_load_explicit(&runtime.labels, memory_order_relaxed);
}

#endif
