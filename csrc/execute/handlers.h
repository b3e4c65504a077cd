/* Defines `handlers`, the handlers of a memory space, in the order of ops.def. Included by the file of the space, which
 * defines MEMORY as the structure of it. Threads and locks: as in entry.h. */
#include "execute/entry.h"

#define OPERATION(name, engine, divisibility, buffers, attributes) \
  static ffi_error *handle_##name(ffi_frame *frame) { return entry_##name(frame, &MEMORY); }
#include "core/ops.def"
#undef OPERATION

#define OPERATION(name, engine, divisibility, buffers, attributes) handle_##name,
static ffi_handler *const handlers[] = {
#include "core/ops.def"
};
#undef OPERATION
