/* JAXMPI_CHECK: before a collective the ranks of its communicator exchange what they are about to do.
 *
 * If they differ they would deadlock or compute wrong numbers; so all of them get an error, and nothing is sent. A call
 * is compared once, before its first chunk, by the thread that calls MPI for it. Such a call always takes the transport
 * TRANSPORT_WAIT, so its error is raised by the call itself. A message tells its receiver what it consists of.
 *
 * Threads: both functions run in the thread in which XLA called the handler, without the GIL. compare_decide needs no
 * lock; call_body calls compare_ranks, which calls MPI, with runtime.lock held where `serialize` is set. */
#ifndef JAXMPI_COMPARE_H
#define JAXMPI_COMPARE_H

#include "core/core.h"

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

/* Sets `compared`, `labelled` and `share` of a call that is fully decoded. */
void compare_decide(struct call *call);

/* NULL if all ranks make the same call; otherwise the error, on all of them. */
ffi_error *compare_ranks(struct call *call);

#endif
