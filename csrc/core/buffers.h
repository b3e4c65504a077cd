/* What is done with the buffers of a call in the memory that they lie in. On a device it is enqueued on the call's
 * stream. Any thread. */
#ifndef JAXMPI_BUFFERS_H
#define JAXMPI_BUFFERS_H

#include "core/core.h"

/* Fill with zeros, and copy between two buffers of the call. */
ffi_error *call_zero(const struct call *call, void *data, size_t bytes);
ffi_error *call_move(const struct call *call, void *to, const void *from, size_t bytes);

/* Sets all bits of what has not been received, though the call succeeds since a later one will tell (failure.h): NaN,
 * -1 or true, as where a device's call fails after it has returned. Nothing to do in device memory: there calls fail
 * before anyone sees their results. */
static inline void buffer_spoil(const struct call *call, const struct buffer *buffer) {
  if (call->memory->host && buffer->count > 0) memset(buffer->data, 0xff, buffer_bytes(buffer));
}

#endif
