/* Messages between two ranks. post_send is for others than the bodies: see struct abi. Threads: as there. */
#ifndef JAXMPI_MESSAGES_H
#define JAXMPI_MESSAGES_H

#include "mpi/bodies.h"

#define post_send        ABI_LOCAL(post_send)
#define announce_message ABI_LOCAL(announce_message)
#define send_message     ABI_LOCAL(send_message)
#define take_announced   ABI_LOCAL(take_announced)

int post_send(const struct call *call, intptr_t *request);

/* The messages of a plan that leave: MPI_Request of each, and how many are under way. */
struct departures {
  struct call *call;
  intptr_t *handles;
  int count;
};

/* Labels the message to a peer, of which the rest may be composed later, and sends its notice if that is not itself.
 * Then send_message sends it. They return an MPI error code. */
int announce_message(struct departures *sent, const struct peer *peer, char *message, uint64_t label);
int send_message(struct departures *sent, const struct peer *peer, const char *message);

/* Receives what a notice has announced: into the stage, unless that is NULL, if it has as many bytes as are expected.
 * Then `label` is its label. */
ffi_error *take_announced(struct call *c, const struct peer *peer, char *stage, int64_t *bytes, uint64_t *label);

#endif
