/* From XLA's frame to an operation and back. Called by XLA, in any of its threads, without the GIL. */
#ifndef JAXMPI_ENTRY_H
#define JAXMPI_ENTRY_H

#include "core/core.h"

/* The handler of the operation in that row of ops.def, for buffers in `memory`; of two stages: as XLA makes a program,
 * and each call. */
ffi_error *entry_run(ffi_frame *frame, int row, const struct memory *memory);

#endif
