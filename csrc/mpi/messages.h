/* Messages between two ranks. The core calls post_send: see struct abi, also for the threads. */
#ifndef JAXMPI_MESSAGES_H
#define JAXMPI_MESSAGES_H

#include "mpi/bodies.h"

#define post_send      ABI_LOCAL(post_send)
#define send_planned   ABI_LOCAL(send_planned)
#define take_announced ABI_LOCAL(take_announced)

int post_send(const struct call *call, intptr_t *request);

/* The messages of a plan that leave: the MPI_Request of each, and how many are under way. */
struct departures {
  struct call *call;
  intptr_t *handles;
  int count;
};

/* Compose and send all messages of a plan, each behind a notice if it is long. `next`: the next pack. Return an MPI
 * error code. */
int send_planned(struct departures *sent, const struct plan *plan, char *stage, uint64_t label, int *next);

/* Receive the message that a notice has announced. If `stage` is not NULL and the message has as many bytes as
 * expected, it is received into the stage, and `label` is set. Otherwise it is dropped. */
ffi_error *take_announced(struct call *c, const struct peer *peer, char *stage, int64_t *bytes, uint64_t *label);

#endif
