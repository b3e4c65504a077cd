/* Executing a call: how it is divided, its chunks, its body.
 *
 * Threads: the thread in which XLA called the handler, or the one in which a device's transport calls MPI (the driver's
 * callback thread or one of ours), without the GIL. call_body, and call_chunks by it, take runtime.lock where MPI
 * allows one call at a time: the caller must not hold it, but may hold the lock of a stream state. The other functions
 * need no lock. */
#ifndef JAXMPI_CALL_H
#define JAXMPI_CALL_H

#include "core/compare.h"
#include "core/core.h"
#include "core/failure.h"
#include "devices/memory.h"

/* Sets what is known only once the buffers are, except for how the call is divided. */
static inline void call_settle(struct call *call) {
  call->compared = call->labelled = call->sending = false;
  if (atomic_load_explicit(&call->comm->to_compare, memory_order_relaxed) > 0) compare_decide(call);
  call->logged = atomic_load_explicit(&runtime.log, memory_order_relaxed);
}

/* Makes the MPI calls of a call whose buffers MPI can access: undivided, or chunk by chunk. */
ffi_error *call_body(struct call *call);
ffi_error *call_chunks(struct call *call);

/* Makes a call with one buffer, still without data, in the place of each list. NULL, or the error. */
ffi_error *call_join(const struct call *leaves, struct call *call);

/* Makes the MPI call for buffers in host memory that are joined. */
ffi_error *call_leaves(struct call *call);

/* Sets the division of a call, once its buffers are known. */
void call_divide(struct call *call);

/* The rows of a buffer as a matrix; 1 for a buffer that the core uses, which is not divided. */
static inline int call_rows(const struct call *call, const struct buffer *buffer) {
  if (role_is_of_host(buffer->role)) return 1;
  return role_is_written(buffer->role) ? call->division.rows_written : call->division.rows_read;
}

/* Reduces MPI's buffers to the chunk that begins at column `first`: `data` points to that column in the first row,
 * `count` is the number of elements in all rows. */
void call_cut(struct call *call, int64_t first);

/* Memory for a call. One piece is kept for the next: fresh memory of the system's costs more than what it is for. */
struct scratch {
  size_t bytes;
  _Alignas(max_align_t) char data[];
};
struct scratch *scratch_take(size_t bytes); /* NULL: out of memory */
void scratch_give(struct scratch *scratch);

/* NULL if the communicator can be used; otherwise the error. */
ffi_error *call_check(const struct call *call);

#endif
