/* The errors of a call, whose texts name the operation, the rank and what was passed.
 *
 * Threads: the functions call_fail... are called by the thread that executes the call, be it XLA's, the driver's
 * callback thread or one of ours; any thread may call the functions at the end. No lock is needed, and runtime.lock may
 * be held. Each error counts in runtime.failures; if the call's frame is NULL it is deferred, and what is returned may
 * only be compared with NULL. */
#ifndef JAXMPI_FAILURE_H
#define JAXMPI_FAILURE_H

#include "core/core.h"
#include "devices/memory.h"

/* An error with a text by printf, after "jaxmpi.NAME on rank R of N: ". */
__attribute__((format(printf, 3, 4))) ffi_error *call_fail(const struct call *call, enum ffi_error_code code,
                                                           const char *format, ...);

/* The first of two errors, of which each may be NULL; the other is freed. */
ffi_error *call_first(const struct call *call, ffi_error *first, ffi_error *second);

/* The error for an attribute whose number belongs to no object in this process. */
ffi_error *call_fail_unknown(const struct call *call, const char *attribute);

/* The error for a code that a driver's function has returned in this thread. */
ffi_error *call_fail_driver(const struct call *call, const struct memory *memory, int code);
#define TRY_DRIVER(call, expression)                                      \
  do {                                                                    \
    int code_ = (expression);                                             \
    if (code_ != 0) return call_fail_driver(call, (call)->memory, code_); \
  } while (0)

/* The error for a code that an MPI function has returned: the library's text, and what was passed to the call. */
ffi_error *call_fail_mpi(const struct call *call, int code);

/* Takes the deferred error, which the caller then frees; NULL if there is none. */
static inline struct failure *failure_take(void) { return atomic_exchange(&runtime.deferred, NULL); }

/* The same for an operation of this thread: only the thread that imported the package defers errors. */
static inline struct failure *failure_of_thread(void) {
  bool deferred = atomic_load_explicit(&runtime.deferred, memory_order_relaxed) != NULL;
  return deferred && importer ? failure_take() : NULL;
}

#endif
