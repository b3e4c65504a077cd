#include "execute/body.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/failure.h"
#include "core/plan.h"
#include "observe/log.h"
#include "observe/timeline.h"
#include "observe/watchdog.h"
#include "requests/progress.h"

static ffi_error *fail_freed(const struct call *call) {
  if (atomic_load(&call->comm->given_up))
    return call_fail(call, FFI_FAILED_PRECONDITION,
                     "the communicator has been given up by jaxmpi.survive.recover, because a rank had died. Nothing "
                     "was sent. Use the communicator that recover has returned, and make grids and maps again on it");
  return call_fail(call, FFI_FAILED_PRECONDITION,
                   "the communicator has been freed since this function was compiled; nothing was sent. "
                   "Call it again with a live communicator, or free the communicator later");
}

ffi_error *call_check(const struct call *call) {
  if (runtime_has_ended()) return call_fail(call, FFI_FAILED_PRECONDITION, "%s; nothing was sent", runtime.ended);
  if (call->comm == NULL) return call_fail_unknown(call, "comm");
  /* Requests in flight on a freed communicator are completed. `given_up` is stored before `freed`. */
  if (atomic_load_explicit(&call->comm->freed, memory_order_acquire) && !waits_for_request(call->operation->row))
    return fail_freed(call);
  return NULL;
}

static inline ffi_error *run_body(struct call *call) {
  struct watched *record = waits_for_request(call->operation->row) ? NULL : watchdog_begin(call);
  progress_before(call);
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  ffi_error *error = call->comparison.due ? compare_ranks(call) : NULL;
  bool begun = error == NULL;
  call->log.number = 0; /* not every body writes a line */
  if (begun) call_begun(call);
  if (begun) error = call->by_nccl ? runtime.enqueue(call) : runtime.abi->bodies[call->operation->row](call);
  if (runtime.failed != 0 && begun && error == NULL && !has_request(call->operation))
    error = call_confirm_result(call, call->operation);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  error = call_done(call, error);
  watchdog_end(record);
  if (begun && call->log.on && call->log.number != 0) log_end(call, error != NULL);
  return error;
}

static __attribute__((noinline)) ffi_error *body_recorded(struct call *call) {
  call->timeline.from = -1, call->timeline.request = 0;
  bool recorded = timeline_begin(call);
  ffi_error *error = run_body(call);
  if (recorded) timeline_end(call, error != NULL);
  return error;
}

/* The error for a number that is not a valid rank or tag. `first`: as in read_traced. `any`: MPI.ANY_SOURCE is valid,
 * too. */
static ffi_error *fail_envelope(const struct call *call, int index, int64_t value, int64_t first, bool any) {
  const char *name = call->operation->attributes[index].name;
  char shown[32] = "more than 32 bits hold";
  if (value != TOO_LARGE) snprintf(shown, sizeof shown, "%" PRId64, value);
  bool is_tag = call->operation->attributes[index].kind == KIND_TAG;
  if (is_tag && is_kept((int)value))
    return call_fail(call, FFI_INVALID_ARGUMENT,
                     "%s is %s, which is a tag that jaxmpi keeps for itself: choose another; nothing was sent", name,
                     shown);
  if (is_tag)
    return call_fail(call, FFI_INVALID_ARGUMENT, "%s is %s, and must be between 0 and %" PRId64 "%s; nothing was sent",
                     name, shown, runtime.most_tag - first,
                     first > 0 ? " in a derivative (on whose way back sendtag and recvtag are exchanged)" : "");
  return call_fail(call, FFI_INVALID_ARGUMENT,
                   "%s is %s, and must be a rank of the communicator, 0 to %d, or MPI.PROC_NULL%s; nothing was sent",
                   name, shown, call->comm->size - 1,
                   value == ANY_OF_SEVERAL
                       ? " (it stands for MPI.ANY_SOURCE: with a pytree of several arrays the source must be a rank)"
                   : any       ? " or MPI.ANY_SOURCE"
                   : first > 0 ? ", so that the way back of a derivative is known (where source and dest are exchanged)"
                               : "");
}

/* Replace a rank or tag that is TRACED by the value. */
static ffi_error *read_traced(struct call *call, int index, int64_t value) {
  const char *name = call->operation->attributes[index].name;
  const struct abi *abi = runtime.abi;
  int row = call->operation->row;
  int64_t *attribute = &call->attributes[index], first = *attribute - TRACED; /* 0, or what a derivative adds */
  if (call->operation->attributes[index].kind == KIND_RANK) {
    bool any = strcmp(name, "source") == 0 && first == 0;
    *attribute = value;
    if ((value >= 0 && value < call->comm->size) || value == abi->proc_null || (any && value == abi->any_source))
      return NULL;
    return fail_envelope(call, index, value, first, any);
  }
  /* In a derivative the message must belong to the message of the function. */
  bool receives = (row == ROW_recv || row == ROW_irecv) && first == 0;
  bool any = value == abi->any_tag && (receives || strcmp(name, "recvtag") == 0);
  *attribute = any ? value : value + first;
  if (any || (value >= 0 && value + first <= runtime.most_tag && !is_kept((int)value))) return NULL;
  return fail_envelope(call, index, value, first, any);
}

static __attribute__((noinline)) ffi_error *read_envelope(struct call *call) {
  const struct buffer *next = &call->buffers[call->first[call->operation->buffer_count - 1]];
  const struct buffer *end = &call->buffers[call->buffer_count];
  call->reads_envelope = false;
  for (int i = 0; i < call->operation->attribute_count; i++) {
    enum attribute kind = call->operation->attributes[i].kind;
    if ((kind != KIND_RANK && kind != KIND_TAG) || !is_traced(call->attributes[i])) continue;
    if (next == end || next->count != 1 || next->type->code != FFI_DTYPE_S32)
      return call_fail(call, FFI_INTERNAL, "a rank or tag is not passed: reinstall jaxmpi");
    ffi_error *error = read_traced(call, i, *(const int32_t *)(next++)->data);
    if (error != NULL) return error;
  }
  return NULL;
}

ffi_error *call_body(struct call *call) {
  ffi_error *error = call->reads_envelope ? read_envelope(call) : NULL;
  if (error != NULL) return error;
  return timeline_is_on() ? body_recorded(call) : run_body(call);
}
