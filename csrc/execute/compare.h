/* Before a collective the ranks of its communicator compare what they are about to do (JAXMPI_CHECK).
 *
 * If they differ they would deadlock or compute wrong numbers; so all of them get an error, and nothing is sent. A call
 * is compared once, before its first chunk, by the thread that calls MPI for it. Such a call always takes the transport
 * TRANSPORT_WAIT, so its error is raised by the call itself.
 *
 * With JAXMPI_CHECK=1 (runtime.check) that is so for all collectives, without end, and a message tells its receiver
 * what it consists of. Otherwise for the first ones of a communicator (`to_compare`), and no right program may notice:
 * what has a plan is left out, since its messages tell what they are; a start of something does not wait for the other
 * ranks, whose answers come with the wait for it; and other calls wait for them compare_patience at most. A rank that
 * has waited in vain several times compares no more on this communicator, as if the others were not of this library.
 *
 * Threads: the functions run in the thread in which XLA called the handler, without the GIL. compare_decide needs no
 * lock; call_body calls the others, which call MPI, with runtime.lock held where `serialize` is set. */
#ifndef JAXMPI_COMPARE_H
#define JAXMPI_COMPARE_H

#include "core/call.h"
#include "core/runtime.h"

/* What a rank sends: integers of one size, so that there is no padding. The layout is the same on all ranks. */
struct record {
  int64_t call;       /* its number among the collectives on this communicator, from 1 */
  int64_t operation;  /* its row in ops.def */
  int64_t derivative; /* attribute */
  int64_t reduction;  /* its number in the registry; 0: none; USERS_REDUCTION: not compared */
  int64_t root;       /* -1: none */
  int64_t dtype;      /* XLA's code; -1: there are no buffers */
  int64_t count;      /* elements of a rank's share */
  int64_t arrays;     /* of that many arrays, which are joined or have a plan; 0: of one, or none */
  int64_t sizes;      /* of the share of each of them, as a hash, or the plan's signature; 0: of one, or none */
};
enum { USERS_REDUCTION = 1 };

/* What is in front of a message between two buffers on the host. A message without it is of a rank that calls MPI
 * itself. */
struct label {
  uint64_t magic;  /* LABEL_MAGIC */
  int64_t dtype;   /* XLA's code */
  int64_t count;   /* elements */
  char lines[232]; /* of the program that sends, with "called at " in front; empty: not known */
};
#define LABEL_MAGIC UINT64_C(0x6a61786d70692d31)

struct label label_of(const struct call *call, const struct buffer *buffer);

/* The label of a message; NULL: it has none. */
const struct label *label_find(const void *message, int64_t bytes);

/* Sets `compared`, `labelled` and, if either is set, `share` of a call that is fully decoded. */
void compare_decide(struct call *call);

/* NULL if all ranks make the same call, as far as this one has heard; otherwise the error, on all of them. */
ffi_error *compare_ranks(struct call *call);

/* Hears whether the ranks have started the same on this communicator, in the wait for it: the error if not. `waits`:
 * some time for the answer. */
ffi_error *compare_started(const struct call *call, struct communicator *comm, bool waits);

extern double compare_patience; /* seconds; tests change it */

/* Whether messages tell what they consist of. */
static inline bool has_labels(void) {
  return atomic_load_explicit(&runtime.check, memory_order_relaxed) &&
         atomic_load_explicit(&runtime.labels, memory_order_relaxed);
}

#endif
