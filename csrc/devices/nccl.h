/* NCCL, and RCCL on AMD's devices: an engine that carries collectives in the order of XLA's stream.
 *
 * The host enqueues a call on the stream, and waits only if 64 calls have not ended. MPI has no part in the call. All
 * ranks of a communicator must use the same engine for a call, and a rank does not ask the others. So the engine
 * depends on the communicator, the row of ops.def, the reduction and the dtype alone, which are the same on all ranks:
 * call_is_by_nccl. An array in CPU memory goes by NCCL, too, through pinned memory, and the host waits until the call
 * has ended.
 *
 * A call of NCCL waits for its peers inside the device's stream. Each rank executes its calls, by either engine, in the
 * order of the program, as if every collective synchronized, which MPI allows. So a program of one thread that is right
 * with MPI does not hang. Two threads could enqueue calls in another order than the threads of another rank. So only
 * the first thread that uses NCCL for arrays of a device may use it. For arrays in CPU memory XLA, and not the program,
 * chooses the thread: there Python refuses a second thread (communicators.py). If calls are on several streams of a
 * device, each one waits for the call of NCCL before it.
 *
 * All ranks make the communicator of NCCL together, at the first call. It is freed with the communicator of MPI. At the
 * end of the process it stays, because freeing it would wait for ranks that have failed.
 *
 * A thread of ours, the follower, waits for the end of each enqueued call. The watchdog reports a call that does not
 * end (watchdog.h). The follower ends the job if NCCL reports an error of a call under way. It lets MPI progress
 * meanwhile, and while a call is being enqueued, because another rank may need a message of this rank before it gets to
 * the call.
 *
 * Threads: nccl_open is called under the GIL, before the first call. The thread in which XLA called the handler calls
 * nccl_run_host, and runtime.enqueue, without the GIL. MPI calls nccl_free. A lock protects NCCL, which allows one call
 * at a time. The thread that makes a communicator holds the lock while it waits for other ranks, and takes the lock of
 * the stream states for a moment. The follower tries to take the lock, and does not wait for it. nccl_run_host holds a
 * lock of its own, under which it takes the other. */
#ifndef JAXMPI_NCCL_H
#define JAXMPI_NCCL_H

#include "core/call.h"
#include "core/runtime.h"

/* Load NCCL for the devices of `memory`, from `path`, and set runtime.enqueue. `device`: the number of the first device
 * that JAX uses; calls of arrays in CPU memory use it unless an earlier call has chosen one. Return the version, 21805
 * for 2.18.5, or 0 if NCCL cannot be used: `why` gets the reason. */
int nccl_open(const struct memory *memory, int device, const char *path, char *why, size_t size);

/* Execute a call whose arrays are in CPU memory. */
ffi_error *nccl_run_host(struct call *call);

/* Free the communicator of NCCL that belongs to `comm`. All ranks of `comm` call it. */
void nccl_free(struct communicator *comm);

/* Stop the follower, and free streams, events and pinned memory. Called before transport_finish. */
void nccl_finish(void);

#endif
