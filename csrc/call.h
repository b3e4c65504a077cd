/* From XLA's frame to the body of an operation and back. */
#ifndef JAXMPI_CALL_H
#define JAXMPI_CALL_H

#include "core.h"
#include "memory.h"

/* The handler of `operation` for buffers in `memory`, of two stages: as XLA makes a program, and each call. */
ffi_error *call_run(ffi_frame *frame, const struct operation *operation, const struct memory *memory);

/* The error of a call, text by printf, behind "jaxmpi.NAME on rank R of N: ". */
__attribute__((format(printf, 3, 4))) ffi_error *call_fail(const struct call *call, enum ffi_error_code code,
                                                           const char *format, ...);

/* The error for a code that an MPI function has returned: the library's own text, and what the call was given. */
ffi_error *call_fail_mpi(const struct call *call, int code);

#endif
