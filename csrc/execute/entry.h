/* From XLA's frame to an operation and back.
 *
 * Threads: XLA calls the functions, in the thread that called the program or in one of XLA's, several at the same time,
 * without the GIL and with no lock of ours held. They take the locks of call.h and, on a device, of transport.h. */
#ifndef JAXMPI_ENTRY_H
#define JAXMPI_ENTRY_H

#include "base/memory.h"

/* The handler of each operation, for buffers in `memory`. It serves two stages: instantiation, once per program, which
 * checks the attributes, and execution. */
#define OPERATION(name, engine, divisibility, buffers, attributes) \
  ffi_error *entry_##name(ffi_frame *frame, const struct memory *memory);
#include "core/ops.def"
#undef OPERATION

/* How often `done` has been executed in this thread. It comes after all other operations of the program, by the data
 * flow that keeps them in order. So if a call of the program has counted here, the communication is over. */
extern _Thread_local unsigned done_here;

#endif
