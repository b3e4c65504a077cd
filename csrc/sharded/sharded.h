/* Collectives of JAX's own sharded programs, by MPI: what trampoline.c calls for XLA.
 *
 * Each becomes a call of an operation of ops.def, so it is watched, recorded, logged, compared and divided like those
 * of jaxmpi's own functions. XLA asks for a communicator without saying of which processes; so Python makes it first
 * (sharded_connect), and then runs a program by which XLA asks for just that one (sharded_expect).
 *
 * An error is kept as a text, for XLA, which asks for it in the same thread: sharded_error.
 *
 * Threads: sharded_connect is called without the GIL, sharded_expect under it. The others are called by the thread that
 * executes XLA's program, without the GIL; call_body takes runtime.lock where MPI allows one call at a time.
 */
#ifndef JAXMPI_SHARDED_H
#define JAXMPI_SHARDED_H

#include "core/runtime.h"

/* Makes the communicator of these ranks of COMM_WORLD, in this order; all of them call it, and nobody else. */
ffi_error *sharded_connect(struct group *group);

/* The communicator that XLA will ask for next; NULL: none. One of this rank alone waits until XLA asks while none of
 * several ranks is expected, since XLA asks for it in programs of several processes only. */
void sharded_expect(struct communicator *comm);

/* The communicator that XLA asks for, of which it takes itself for rank `rank`; NULL if another was expected. */
struct communicator *sharded_expected(int rank);

/* The text of this thread's last error. */
const char *sharded_error(void);

/* Sets it; returns what stands for it. */
ffi_error *sharded_fail(const char *text);

/* `type`: XLA's code; `reduction`: an object. `count` and `bytes` are what XLA has made of its own 64-bit numbers. */
ffi_error *sharded_allreduce(const void *in, void *out, int count, int type, struct reduction *reduction,
                             struct communicator *comm);
ffi_error *sharded_allgather(const void *in, int count, int type, void *out, struct communicator *comm);
ffi_error *sharded_reduce_scatter(const void *in, void *out, int count, int type, struct reduction *reduction,
                                  struct communicator *comm);
ffi_error *sharded_exchange(const void *in, int bytes, int to, void *out, int from, struct communicator *comm);

struct message;

/* A message that is under way: sent, or to be received by sharded_wait, which frees it. */
ffi_error *sharded_send(const void *in, int bytes, int to, struct communicator *comm, struct message **message);
ffi_error *sharded_receive(void *out, int bytes, int from, struct communicator *comm, struct message **message);
ffi_error *sharded_wait(struct message *message);

#endif
