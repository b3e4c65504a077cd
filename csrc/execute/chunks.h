/* The division of a call into calls of MPI: in chunks, and with several buffers joined to one.
 *
 * Threads: as body.h. call_chunks and call_leaves call call_body, and so take runtime.lock where MPI allows one call at
 * a time; the other functions need no lock. */
#ifndef JAXMPI_CHUNKS_H
#define JAXMPI_CHUNKS_H

#include "core/call.h"
#include "core/runtime.h"

/* Set the division of a call, once the buffers are known. */
void call_divide(struct call *call);

/* The rows of a buffer as a matrix; 1 for a buffer that the core uses, which is not divided. */
static inline int call_rows(const struct call *call, const struct buffer *buffer) {
  if (role_is_of_host(buffer->role)) return 1;
  return role_is_written(buffer->role) ? call->division.rows_written : call->division.rows_read;
}

/* Reduce MPI's buffers to the chunk that begins at column `first`: `data` points to that column in the first row,
 * `count` is the number of elements in all rows. */
void call_cut(struct call *call, int64_t first);

/* Make the MPI calls of a call in chunks, whose buffers MPI can access. */
ffi_error *call_chunks(struct call *call);

/* Make a call with one buffer, still without data, in the place of each list. NULL, or the error. */
ffi_error *call_join(const struct call *leaves, struct call *call);

/* Make the MPI call for buffers in host memory that are joined. */
ffi_error *call_leaves(struct call *call);

/* Memory for a call. One piece is kept for the next call: fresh memory of the system costs more than its use. */
struct scratch {
  size_t bytes;
  _Alignas(64) char data[]; /* at the beginning of a cache line */
};
struct scratch *scratch_take(size_t bytes); /* NULL: out of memory */
void scratch_give(struct scratch *scratch);

#endif
