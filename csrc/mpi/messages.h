/* Messages between two ranks. The core calls post_send: see struct abi, also for the threads. */
#ifndef JAXMPI_MESSAGES_H
#define JAXMPI_MESSAGES_H

#include "mpi/bodies.h"

#define post_send        ABI_LOCAL(post_send)
#define announce_message ABI_LOCAL(announce_message)
#define send_message     ABI_LOCAL(send_message)
#define take_announced   ABI_LOCAL(take_announced)

int post_send(const struct call *call, intptr_t *request);

/* The messages of a plan that leave: the MPI_Request of each, and how many are under way. */
struct departures {
  struct call *call;
  intptr_t *handles;
  int count;
};

/* announce_message labels the message to a peer, and sends the notice if the notice is not the message itself. The rest
 * of the message may be composed later. Then send_message sends the message. Both return an MPI error code. */
int announce_message(struct departures *sent, const struct peer *peer, char *message, uint64_t label);
int send_message(struct departures *sent, const struct peer *peer, const char *message);

/* Receive the message that a notice has announced. If `stage` is not NULL and the message has as many bytes as
 * expected, it is received into the stage, and `label` is set. Otherwise it is dropped. */
ffi_error *take_announced(struct call *c, const struct peer *peer, char *stage, int64_t *bytes, uint64_t *label);

#endif
