/* Included once for each memory space, whose name is SPACE: its handlers, in the order of ops.def. */
#define HANDLER2(space, name) space##_##name
#define HANDLER(space, name)  HANDLER2(space, name)

#define OPERATION(name, division, attributes)                                      \
  static ffi_error *HANDLER(SPACE, name)(ffi_frame * frame) {                      \
    return entry_run(frame, &operation_rows[ROW_##name], &HANDLER(memory, SPACE)); \
  }
#include "ops.def"
#undef OPERATION

#define OPERATION(name, division, attributes) HANDLER(SPACE, name),
static ffi_handler *const HANDLER(SPACE, handlers)[] = {
#include "ops.def"
    NULL};
#undef OPERATION

#undef HANDLER
#undef HANDLER2
