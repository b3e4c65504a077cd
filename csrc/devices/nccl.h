/* NCCL, and RCCL on AMD's devices: an engine that carries collectives in the order of XLA's stream.
 *
 * The host does not wait: a call is enqueued on the stream, and MPI has no part in it. All ranks of a communicator must
 * use the same engine for a call, and a rank does not ask the others. So the engine depends on nothing but the
 * communicator, the row of ops.def, the reduction and the dtype, which are the same on all of them: call_is_by_nccl. An
 * array in CPU memory goes by NCCL, too, through pinned memory, and the call waits for it.
 *
 * A call of NCCL waits for its peers inside of the device's stream. Each rank executes its calls, by either engine, in
 * the order of the program, as if every collective synchronized. So a program of one thread that is right with MPI does
 * not hang. With two threads the calls could have another order than on another rank. So the first thread that uses
 * NCCL for arrays of a device is the only one that may. Which thread XLA takes for arrays in CPU memory says nothing of
 * the program: there Python refuses a second thread (communicators.py). If several streams of a device are used, a call
 * waits for the call of NCCL before it.
 *
 * The communicator of NCCL is made at the first call, in which all ranks take part, and freed with the communicator. At
 * the end of the process the communicators stay: freeing them would wait for ranks that have failed.
 *
 * A thread of ours follows the calls that have been enqueued. The watchdog reports one that does not end (watchdog.h).
 * The thread ends the job if NCCL reports an error of a call under way. It lets MPI progress meanwhile, and while a
 * call is being enqueued, because another rank may need a message of this one to get to the call.
 *
 * Threads: nccl_open is called under the GIL, before the first call. The thread in which XLA called the handler calls
 * nccl_run_host, and runtime.enqueue, without the GIL; MPI calls nccl_free. A lock protects NCCL: it allows one call at
 * a time. It is held while a communicator is made, which waits for other ranks and takes the lock of the stream states
 * for a moment. The follower tries to take it, and does not wait for it. nccl_run_host holds a lock of its own, under
 * which it takes the other. */
#ifndef JAXMPI_NCCL_H
#define JAXMPI_NCCL_H

#include "core/call.h"
#include "core/runtime.h"

/* Load NCCL for the devices of `memory`, from `path`. Return the version, 21805 for 2.18.5, or 0: `why` says why not.
 * runtime.enqueue is set if it has been loaded. */
int nccl_open(const struct memory *memory, const char *path, char *why, size_t size);

/* Execute a call of arrays in CPU memory. */
ffi_error *nccl_run_host(struct call *call);

/* Free the communicator of NCCL that belongs to `comm`. All ranks of it do so. */
void nccl_free(struct communicator *comm);

/* Follow no call any more, and free streams, events and pinned memory. Before transport_finish. */
void nccl_finish(void);

#endif
