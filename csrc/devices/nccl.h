/* NCCL, and RCCL on AMD's devices: an engine that carries collectives in the order of XLA's stream.
 *
 * The host does not wait: a call is enqueued on the stream, and MPI has no part in it. All ranks of a communicator must
 * use the same engine for a call, and a rank does not ask the others. So the engine depends on nothing but the
 * communicator, the row of ops.def, the reduction and the dtype, which are the same on all of them: call_is_by_nccl. An
 * array in CPU memory goes by NCCL, too, through pinned memory, for which the call waits.
 *
 * A call of NCCL waits for its peers inside of the device's stream. No program that is right with MPI hangs for that:
 * each rank executes its calls, by either engine, in the order of the program, as if every collective synchronized.
 * Only one thread of a process may use NCCL for arrays of a device, the first that does: two threads could enqueue in
 * another order than those of another rank. If several streams are used, a call waits for the call of NCCL before it.
 *
 * The communicator of NCCL is made at the first call, in which all ranks take part, and freed with the communicator. At
 * the end of the process the communicators stay: freeing them would wait for ranks that have failed.
 *
 * A thread of ours follows the calls that have been enqueued. The watchdog reports one that does not end (watchdog.h).
 * The thread lets MPI progress meanwhile, because another rank may need a message of this one to get to the call.
 *
 * Threads: nccl_open is called under the GIL, before the first call. The thread in which XLA called the handler calls
 * the other functions, without the GIL; MPI calls nccl_free. A lock protects NCCL: it allows one call at a time. It is
 * held while a communicator is made, which waits for other ranks. */
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

/* Follow no call any more, and free streams, events and pinned memory. */
void nccl_finish(void);

#endif
