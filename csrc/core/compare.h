/* The mode JAXMPI_CHECK: before a collective the ranks of its communicator tell each other what they are about to do.
 *
 * Ranks that differ would wait for ever, or get wrong numbers; so all of them get an error, and nothing is sent. A call
 * is compared once, whatever its chunks, by the thread that then calls MPI for it, and nothing is left to a device's
 * stream: an error is the call's own.
 */
#ifndef JAXMPI_COMPARE_H
#define JAXMPI_COMPARE_H

#include "core/core.h"

/* What a rank tells: integers of one size, so that nothing lies between them. The same on all ranks. */
struct record {
  int64_t call;       /* its number among the collectives on this communicator, from 1 */
  int64_t operation;  /* row of ops.def */
  int64_t derivative; /* attribute */
  int64_t reduction;  /* its number in the registry; 0: none, USERS_REDUCTION: cannot be compared */
  int64_t root;       /* -1: none */
  int64_t dtype;      /* XLA's code; -1: there are no buffers */
  int64_t count;      /* elements of a rank's share */
};
enum { USERS_REDUCTION = 1 };

/* Decides whether a call, of which all is decoded, is compared. */
void compare_decide(struct call *call);

/* Compares; NULL where all ranks do the same. */
ffi_error *compare_ranks(struct call *call);

#endif
