/* Defines the handlers of a memory space, in the order of ops.def. Included by the file of the space, which defines
 * SPACE as the name of it. Threads and locks: as in entry.h. */
#include "execute/entry.h"

#define HANDLER2(space, name) space##_##name
#define HANDLER(space, name)  HANDLER2(space, name)

#define OPERATION(name, divisibility, buffers, attributes) \
  static ffi_error *HANDLER(SPACE, name)(ffi_frame * frame) { return entry_##name(frame, &HANDLER(memory, SPACE)); }
#include "core/ops.def"
#undef OPERATION

#define OPERATION(name, divisibility, buffers, attributes) HANDLER(SPACE, name),
extern ffi_handler *const HANDLER(handlers, SPACE)[];
ffi_handler *const HANDLER(handlers, SPACE)[] = {
#include "core/ops.def"
    NULL};
#undef OPERATION

#undef HANDLER
#undef HANDLER2
