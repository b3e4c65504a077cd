/* Executing a call: the check whether it can be made at all, and the body, with everything around it.
 *
 * Threads: the thread in which XLA called the handler, or the one in which a device's transport calls MPI (the driver's
 * callback thread or one of ours), without the GIL. call_body takes runtime.lock where MPI allows one call at a time:
 * the caller must not hold it, but may hold the lock of a stream state. The other functions need no lock. */
#ifndef JAXMPI_BODY_H
#define JAXMPI_BODY_H

#include "execute/compare.h"

/* NULL if the communicator can be used; otherwise the error. */
ffi_error *call_check(const struct call *call);

/* Set the members that depend on the buffers, except for the division of the call. */
static inline void call_settle(struct call *call) {
  call->comparison.due = call->labelled = call->sending = false;
  if (atomic_load_explicit(&call->comm->to_compare, memory_order_acquire) > 0) compare_decide(call);
  call->log.on = atomic_load_explicit(&runtime.log, memory_order_relaxed);
}

/* Make the MPI calls of a call whose buffers MPI can access, undivided. */
ffi_error *call_body(struct call *call);

#endif
