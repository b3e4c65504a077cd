/* The collectives of JAX's own sharded programs, by MPI: communicators and errors. XLA asks for a communicator without
 * naming its processes. So Python makes the communicator first (sharded_connect), and then runs a program for which XLA
 * asks for exactly this one (sharded_expect).
 *
 * Threads: sharded_connect is called without the GIL, sharded_expect under it. No function takes a lock, except that
 * the call of sharded_connect takes runtime.lock where MPI allows one call at a time. */
#ifndef JAXMPI_SHARDED_H
#define JAXMPI_SHARDED_H

#include "core/runtime.h"

/* Make the communicator of these ranks of COMM_WORLD, in this order. All of them call it, and no other rank. Return
 * whether it was made: the error is in sharded_error. */
bool sharded_connect(struct group *group);

/* Set the communicator that XLA will ask for next; NULL: none. A communicator of this rank alone is kept until XLA
 * asks while no communicator of several ranks is expected: only programs of several processes ask for one. */
void sharded_expect(struct communicator *comm);

/* Return the text of this thread's last error. */
const char *sharded_error(void);

#endif
