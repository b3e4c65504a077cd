/* The collectives of JAX's own sharded programs, by MPI: what trampoline.c calls for XLA.
 *
 * Each becomes a call of an operation of ops.def. So it is watched, recorded, logged, compared and divided like
 * jaxmpi's own functions. XLA asks for a communicator without naming its processes. So Python makes the communicator
 * first (sharded_connect), and then runs a program for which XLA asks for exactly this one (sharded_expect).
 *
 * An error is kept as a text for XLA, which asks for it in the same thread: sharded_error.
 *
 * Threads: sharded_connect is called without the GIL, sharded_expect under it. The thread that executes XLA's program
 * calls the others, without the GIL. call_body takes runtime.lock where MPI allows one call at a time. */
#ifndef JAXMPI_SHARDED_H
#define JAXMPI_SHARDED_H

#include "core/runtime.h"

/* Make the communicator of these ranks of COMM_WORLD, in this order. All of them call it, and no other rank. */
ffi_error *sharded_connect(struct group *group);

/* Set the communicator that XLA will ask for next; NULL: none. A communicator of this rank alone is kept until XLA
 * asks while no communicator of several ranks is expected: only programs of several processes ask for one. */
void sharded_expect(struct communicator *comm);

/* Return the communicator that XLA asks for as rank `rank`; NULL if another one was expected. */
struct communicator *sharded_expected(int rank);

/* Return the text of this thread's last error. */
const char *sharded_error(void);

/* Set the text of this thread's error. Return a value that stands for it. */
ffi_error *sharded_fail(const char *text);

/* `type`: XLA's code; `reduction`: an object. XLA has converted its 64-bit numbers to `count` and `bytes`. */
ffi_error *sharded_allreduce(const void *in, void *out, int count, int type, struct reduction *reduction,
                             struct communicator *comm);
ffi_error *sharded_allgather(const void *in, int count, int type, void *out, struct communicator *comm);
ffi_error *sharded_reduce_scatter(const void *in, void *out, int count, int type, struct reduction *reduction,
                                  struct communicator *comm);
ffi_error *sharded_exchange(const void *in, int bytes, int to, void *out, int from, struct communicator *comm);

struct message;

/* Messages under way. sharded_wait receives a message, if it was not sent, and frees it. */
ffi_error *sharded_send(const void *in, int bytes, int to, struct communicator *comm, struct message **message);
ffi_error *sharded_receive(void *out, int bytes, int from, struct communicator *comm, struct message **message);
ffi_error *sharded_wait(struct message *message);

#endif
