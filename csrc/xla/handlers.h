/* Included by the file of each memory space, whose name is SPACE: its handlers, in the order of ops.def. */
#include "xla/entry.h"

#define HANDLER2(space, name) space##_##name
#define HANDLER(space, name)  HANDLER2(space, name)

#define OPERATION(name, divisibility, buffers, attributes)        \
  static ffi_error *HANDLER(SPACE, name)(ffi_frame * frame) {     \
    return entry_run(frame, ROW_##name, &HANDLER(memory, SPACE)); \
  }
#include "core/ops.def"
#undef OPERATION

#define OPERATION(name, divisibility, buffers, attributes) HANDLER(SPACE, name),
static ffi_handler *const handlers[] = {
#include "core/ops.def"
    NULL};
#undef OPERATION

#undef HANDLER
#undef HANDLER2
