/* The transports of arrays in a device's memory to MPI and back.
 *
 * aware    MPI gets device pointers. The thread that executes the call calls MPI, after waiting for the stream's
 *          earlier work (and no other).
 * staged   MPI gets copies in pinned host memory, in stream order: copy down, MPI call, copy up. enum transport says
 *          which thread calls MPI, and thereby whether the thread that executes the call has to wait.
 *
 * Only one thread may leave operations to the stream: the one that imported the package. If several threads enqueued
 * operations on one stream, the order could differ from rank to rank. An operation that waits for peers would then hold
 * up the operations behind it, which are different ones on each rank, so that all ranks wait. A single thread runs the
 * same part of the program on each rank, so the operations on the stream have the order of the program. Operations of
 * other threads (TRANSPORT_WAIT) hold up nothing on the stream. They only wait for operations that this thread has
 * enqueued before.
 *
 * An operation that the ranks compare first (compare.h) waits for the stream on every transport.
 *
 * A staged operation that can be divided goes in chunks if the communicator has a chunk size: one chunk is copied while
 * another is with MPI, on streams of our own.
 *
 * The thread that imported the package leaves calls to streams in one of two ways: see jobs.h. If no thread waits, an
 * error of MPI comes after the operation has returned. Then the next operation reports the error, and all bits of the
 * result are set (NaN; -1; true).
 *
 * Threads: a handler calls transport_run in the thread in which XLA called the handler, without the GIL and with no
 * lock held. It takes states_lock for a moment, and holds the lock `taken` of a stream state until it returns. Under
 * that it takes the lock of jobs.h for a moment, runtime.lock during an MPI call, or the lock of nccl.h. MPI calls
 * transport_drain in the thread that frees a communicator or finalizes MPI; it takes states_lock. transport_finish is
 * called once, at the end of the program, without the GIL; it takes states_lock, and then `taken` of each state.
 */
#ifndef JAXMPI_TRANSPORT_H
#define JAXMPI_TRANSPORT_H

#include "core/call.h"
#include "core/runtime.h"

/* Execute a call whose buffers lie in a device's memory. */
ffi_error *transport_run(struct call *call);

/* Wait for the operations left to streams. */
void transport_drain(void);

/* Wait for the operations left to streams, and free all streams, events and pinned memory. Drop the operations of a
 * stream if the device has failed. Memory that MPI may still be using stays until the next call of this function. */
void transport_finish(void);

#endif
