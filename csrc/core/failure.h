/* The errors of a call, which say which it is and what it was given. */
#ifndef JAXMPI_FAILURE_H
#define JAXMPI_FAILURE_H

#include "core/core.h"
#include "devices/memory.h"

/* The error of a call, text by printf, behind "jaxmpi.NAME on rank R of N: ". */
__attribute__((format(printf, 3, 4))) ffi_error *call_fail(const struct call *call, enum ffi_error_code code,
                                                           const char *format, ...);

/* The error for an attribute whose number is that of no object here. */
ffi_error *call_fail_unknown(const struct call *call, const char *attribute);

/* The error for a code that a driver's function has returned. */
ffi_error *call_fail_driver(const struct call *call, const struct memory *memory, int code);

/* The error for a code that an MPI function has returned: the library's own text, and what the call was given. */
ffi_error *call_fail_mpi(const struct call *call, int code);

/* Takes the deferred error, if there is one; it is the caller's, to be freed. */
static inline struct failure *failure_take(void) {
  if (atomic_load_explicit(&runtime.deferred, memory_order_relaxed) == NULL) return NULL;
  return atomic_exchange(&runtime.deferred, NULL);
}

#endif
