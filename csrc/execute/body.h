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

/* Return whether NCCL carries a call: devices/nccl.h says on what this may depend. */
static inline bool call_is_by_nccl(const struct call *call) {
  if (!comm_is_by_nccl(call->comm)) return false;
  if (call->operation->engine != ENGINE_NCCL) return false;
  int at = attribute_of(call->operation, KIND_REDUCTION);
  if (at < 0) return true;
  const struct reduction *reduction = object_of(call->attributes[at]);
  const struct datatype *type = call->buffers[call->first[0]].type;
  if (reduction->basic < 0 || type == NULL) return false;
  switch (*type->kind) {
    case 'i': /* integer; NCCL has no 16-bit integers */
      return type->bytes != 2;
    case 'f': /* floating */
    case 'h': /* half; of NCCL's MAX and MIN a NaN need not win */
      return reduction->basic <= BASIC_PROD;
    default: /* of complex numbers, the sum */
      return *type->kind == 'c' && reduction->basic == BASIC_SUM;
  }
}

/* Set the members that depend on the buffers, except for the division of the call. */
static inline void call_settle(struct call *call) {
  call->by_nccl = call_is_by_nccl(call);
  call->comparison.due = call->labelled = call->sending = false;
  if (atomic_load_explicit(&call->comm->to_compare, memory_order_acquire) > 0) compare_decide(call);
  call->log.on = atomic_load_explicit(&runtime.log, memory_order_relaxed);
}

/* Make the MPI calls of a call whose buffers MPI can access, undivided. */
ffi_error *call_body(struct call *call);

#endif
