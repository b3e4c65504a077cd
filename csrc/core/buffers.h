/* Functions for the buffers of a call, in the memory in which they lie. On a device the work is enqueued on the call's
 * stream. Any thread. */
#ifndef JAXMPI_BUFFERS_H
#define JAXMPI_BUFFERS_H

#include "core/call.h"

/* Fill with zeros, and copy between two buffers of the call. */
ffi_error *call_zero(const struct call *call, void *data, size_t bytes);
ffi_error *call_move(const struct call *call, void *to, const void *from, size_t bytes);

#endif
