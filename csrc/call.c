#include "call.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "trace.h"

ffi_error *call_fail(const struct call *call, enum ffi_error_code code, const char *format, ...) {
  char text[2048];
  int length = snprintf(text, sizeof text, "jaxmpi.%s", call->operation->name);
  if (call->comm != NULL)
    length +=
        snprintf(text + length, sizeof text - (size_t)length, " on rank %d of %d", call->comm->rank, call->comm->size);
  length += snprintf(text + length, sizeof text - (size_t)length, ": ");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + length, sizeof text - (size_t)length, format, arguments);
  va_end(arguments);
  atomic_fetch_add(&runtime.failures, 1); /* what was linked to this call fails with it */
  return ffi_fail(call->frame, code, text);
}

ffi_error *call_fail_mpi(const struct call *call, int code) {
  char reason[1024] = "", given[256] = "";
  int length = 0;
  runtime.backend->error_text(code, reason);
  for (int i = 0; i < call->operation->attribute_count; i++)
    if (call->operation->attributes[i].shown)
      length += snprintf(given + length, sizeof given - (size_t)length, "; %s %" PRId64,
                         call->operation->attributes[i].name, call->attributes[i]);
  const struct side *sides[2] = {&call->in, &call->out};
  for (int i = 0; i < 2; i++)
    if (sides[i]->type != NULL)
      length += snprintf(given + length, sizeof given - (size_t)length, "; %s %" PRId64 " of %s", i == 0 ? "in" : "out",
                         sides[i]->count, sides[i]->type->name);
  return call_fail(call, FFI_INTERNAL, "%s failed: %s%s", call->function, reason, given);
}

/* What XLA hands over must be what the Python side has lowered; a difference is a mixture of two versions. Asked once,
 * when XLA makes a program; the calls of that program rely on it. */
static ffi_error *check_attributes(const struct call *call) {
  const ffi_attributes *given = &call->frame->attributes;
  const struct operation *operation = call->operation;
  if (given->size != operation->attribute_count)
    return call_fail(call, FFI_INTERNAL, "%" PRId64 " attributes where the core expects %d: reinstall jaxmpi",
                     given->size, operation->attribute_count);
  for (int i = 0; i < operation->attribute_count; i++) {
    const char *name = operation->attributes[i].name;
    const ffi_span *span = given->names[i];
    const ffi_scalar *scalar = given->values[i];
    if (given->types[i] != FFI_ATTRIBUTE_SCALAR || scalar->dtype != FFI_DTYPE_S64 || span->size != strlen(name) ||
        memcmp(span->data, name, span->size) != 0)
      return call_fail(call, FFI_INTERNAL, "attribute %d is not the integer %s: reinstall jaxmpi", i, name);
  }
  return NULL;
}

static inline void decode_attributes(struct call *call) {
  ffi_scalar *const *scalars = (ffi_scalar *const *)call->frame->attributes.values;
  for (int i = 0; i < call->operation->attribute_count; i++)
    memcpy(&call->attributes[i], scalars[i]->value, sizeof(int64_t));
}

/* The first buffer of a list, if there is one before the tokens. */
static ffi_error *decode_side(const struct call *call, const ffi_buffers *list, struct side *side) {
  const ffi_buffer *buffer = list->size > 0 ? list->buffers[0] : NULL;
  if (buffer == NULL || buffer->dtype == FFI_DTYPE_TOKEN) return NULL;
  side->data = buffer->data;
  side->count = ffi_count(buffer);
  side->type = datatype_find(buffer->dtype);
  if (side->type == NULL || !runtime.known[buffer->dtype])
    return call_fail(call, FFI_UNIMPLEMENTED, "XLA's data type number %d cannot be communicated", buffer->dtype);
  return NULL;
}

ffi_error *call_run(ffi_frame *frame, const struct operation *operation, const struct memory *memory) {
  if (ffi_answer_metadata(frame)) return NULL;
  struct call call; /* not zeroed as a whole, which would take as long as the rest */
  call.frame = frame;
  call.operation = operation;
  call.comm = NULL;
  call.in = call.out = (struct side){NULL, 0, NULL};
  ffi_error *error;
  if (frame->stage == FFI_STAGE_INSTANTIATE) return check_attributes(&call);
  if (frame->stage != FFI_STAGE_EXECUTE) return NULL;
  decode_attributes(&call);
  if (runtime.self != NULL && atomic_load_explicit(&runtime.self->freed, memory_order_relaxed))
    return call_fail(&call, FFI_FAILED_PRECONDITION, "MPI has been finalized; nothing was sent");
  call.comm = registry_at(call.attributes[0]);
  if (call.comm == NULL)
    return call_fail(&call, FFI_FAILED_PRECONDITION,
                     "communicator number %" PRId64
                     " is not known in this process: the program was compiled in another "
                     "one; compile it again here",
                     call.attributes[0]);
  if (atomic_load_explicit(&call.comm->freed, memory_order_relaxed))
    return call_fail(&call, FFI_FAILED_PRECONDITION,
                     "the communicator has been freed since this function was compiled; nothing was sent. "
                     "Call it again with a live communicator, or free the communicator later");
  if ((error = decode_side(&call, &frame->operands, &call.in)) != NULL) return error;
  if ((error = decode_side(&call, &frame->results, &call.out)) != NULL) return error;
  call.traced = atomic_load_explicit(&runtime.trace, memory_order_relaxed);
  if (memory->begin != NULL && (error = memory->begin(&call)) != NULL) return error;
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  error = operation->body(&call);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  if (call.traced) trace_end(&call, error != NULL);
  return memory->end != NULL ? memory->end(&call, error) : error;
}
