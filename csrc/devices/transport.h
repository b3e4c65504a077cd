/* The transports of arrays in a device's memory to MPI and back.
 *
 * aware    MPI gets the device's pointers. It is called by the thread that gives work to the stream, after the stream's
 *          earlier work (and no other) is done.
 * staged   MPI gets copies in pinned host memory, in the order of the stream: a copy down, the call of MPI, a copy up.
 *          enum transport says which thread calls MPI, and with that whether the thread that gives work has to wait.
 *
 * Of several threads only one may leave operations to the stream. What two threads give to one stream is done in an
 * order that may differ from rank to rank, and an operation that waits there for its peers holds up those that come
 * after it: on one rank those of the one thread, on another those of the other. With one thread, the one that plays the
 * same part on each rank, the operations on the stream have the order of its program, and those of other threads hold
 * up nothing. What remains is that they wait behind those of the one thread.
 *
 * An operation that the ranks compare first (compare.h) waits, on each transport.
 *
 * A staged operation that may go in chunks does, where the communicator says so: one chunk is copied while the next is
 * with MPI, on streams of our own.
 *
 * Where nobody waits, an error of MPI cannot be the operation's own: it is deferred to the next one, and the result is
 * filled with ones in all bits (NaN, or -1; true).
 */
#ifndef JAXMPI_TRANSPORT_H
#define JAXMPI_TRANSPORT_H

#include "core/core.h"

/* A call whose buffers lie in a device's memory. */
ffi_error *transport_run(struct call *call);

/* Waits for what is under way. */
void transport_drain(void);

/* Waits for what is under way and gives back all that was taken of the drivers. */
void transport_finish(void);

#endif
