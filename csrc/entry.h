/* From XLA's frame to an operation and back. */
#ifndef JAXMPI_ENTRY_H
#define JAXMPI_ENTRY_H

#include "core.h"

/* The handler of `operation` for buffers in `memory`, of two stages: as XLA makes a program, and each call. */
ffi_error *entry_run(ffi_frame *frame, const struct operation *operation, const struct memory *memory);

#endif
