/* A call on its way: how it is divided, its chunks, its body.
 *
 * Called by the thread that XLA has called the handler in, or by the one that a device's transport has chosen; they
 * take the runtime's lock themselves, where MPI allows one call at a time, and no other lock may be held. */
#ifndef JAXMPI_CALL_H
#define JAXMPI_CALL_H

#include "core/core.h"
#include "core/failure.h"
#include "devices/memory.h"

/* The MPI calls of a call whose buffers MPI reaches, all in one or chunk by chunk. */
ffi_error *call_body(struct call *call);
ffi_error *call_chunks(struct call *call);

/* Decides the division of a call, once, when its buffers are known. */
void call_divide(struct call *call);

/* The rows that a buffer of MPI's has as a matrix; 1 for one of the host's, which is not divided. */
static inline int call_rows(const struct call *call, const struct buffer *buffer) {
  if (role_is_of_host(buffer->role)) return 1;
  return role_is_written(buffer->role) ? call->division.rows_written : call->division.rows_read;
}

/* Cuts MPI's buffers down to the chunk that begins at column `first`: `data` points to its first column, `count` has
 * the elements of all rows. */
void call_cut(struct call *call, int64_t first);

/* Zeros, and a copy from one buffer of the call to the other, in whatever memory they lie. */
ffi_error *call_zero(const struct call *call, void *data, size_t bytes);
ffi_error *call_move(const struct call *call, void *to, const void *from, size_t bytes);

/* Whether the communicator can be used; the error says why not. */
ffi_error *call_check(const struct call *call);

#endif
