/* The errors of a call. The texts name the operation, the rank and the values passed.
 *
 * Threads: the thread that executes the call calls the functions call_fail..., be it XLA's, the driver's callback
 * thread or one of ours; any thread may call the functions at the end. No lock is needed, and runtime.lock may be held.
 * Each error counts in runtime.failures. If the call's frame is NULL the error is deferred, and the result may only be
 * compared with NULL. Kept errors have a lock of their own. */
#ifndef JAXMPI_FAILURE_H
#define JAXMPI_FAILURE_H

#include "base/memory.h"
#include "core/call.h"
#include "core/runtime.h"

/* An error with a text by printf, after "jaxmpi.NAME on rank R of N: ". */
__attribute__((format(printf, 3, 4))) ffi_error *call_fail(const struct call *call, enum ffi_error_code code,
                                                           const char *format, ...);

/* An error, as by call_fail, for a message that has been received and dropped, because there is no room for it. XLA
 * executes nothing that follows an error: other ranks would wait for the rest of a pytree, or messages that they have
 * sent would stay in the channel, for later receives. So, if more of the pytree follows, the error is kept, all bits of
 * `out` are set (as where a device's call fails after it has returned), and the result is NULL. */
__attribute__((format(printf, 3, 4))) ffi_error *call_fail_dropped(const struct call *call, const struct buffer *out,
                                                                   const char *format, ...);

/* Advice where two ranks have arrays of these lengths, if one may be a batch of the other; or "". */
const char *advice_on_vmap(int64_t mine, int64_t other);

/* The result of a call: `error`; or the kept error, if this is the last array of a pytree, or one that fails. Calls of
 * one pytree have equal attributes, except for the place and the numbers that follow from the shapes. */
extern atomic_int failures_kept;
ffi_error *call_fail_kept(const struct call *call, ffi_error *error);
void call_forget_kept(const struct call *call);

/* Before the body of a call. The first leaf discards an error kept for an earlier pytree whose last leaf never ran. */
static inline void call_begun(const struct call *call) {
  if (atomic_load_explicit(&failures_kept, memory_order_relaxed) > 0) call_forget_kept(call);
}
static inline ffi_error *call_done(const struct call *call, ffi_error *error) {
  return atomic_load_explicit(&failures_kept, memory_order_relaxed) == 0 ? error : call_fail_kept(call, error);
}

/* The first of two errors, each of which may be NULL; the other is freed. */
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

/* The error for a code that an MPI function has returned: the library's text, and the values passed to the call. */
ffi_error *call_fail_mpi(const struct call *call, int code);

/* The error if a process has died, or another rank has reported a death, by now. For a collective, or the wait for one,
 * that has returned without an error. Some functions of MPI drop the error of functions that they call inside, and
 * return without having written their result. So does Open MPI's MPI_Allgatherv with an error of the broadcast. But
 * then the process knows of the death, or of the revocation of the communicator. NULL where MPI reports no deaths.
 * Under runtime.lock, as a body. */
ffi_error *call_confirm_result(const struct call *call, const struct operation *operation);

/* Take the deferred error, which the caller then frees; NULL if there is none. */
static inline struct failure *failure_take(void) { return atomic_exchange(&runtime.deferred, NULL); }

/* Take the deferred error for an operation of this thread: NULL in all threads but the one that imported the package,
 * the only one that defers errors. */
static inline struct failure *failure_of_thread(void) {
  bool deferred = atomic_load_explicit(&runtime.deferred, memory_order_relaxed) != NULL;
  return deferred && importer ? failure_take() : NULL;
}

#endif
