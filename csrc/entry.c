#include "entry.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "compare.h"
#include "device.h"

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

/* Puts the address of each object in the place of its number; that of the communicator, the first, is there already. */
static ffi_error *find_objects(struct call *call) {
  const struct operation *operation = call->operation;
  for (int i = 1; i < operation->attribute_count; i++) {
    int64_t *attribute = &call->attributes[i];
    enum attribute kind = operation->attributes[i].kind;
    if (kind == SHOWN || kind == DERIVATIVE || (kind == OBJECT_OR_NONE && *attribute == 0)) continue;
    void *object = registry_at(*attribute);
    if (object == NULL) return call_fail_unknown(call, operation->attributes[i].name);
    *attribute = (int64_t)(intptr_t)object;
  }
  return NULL;
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

/* The error of an operation that was done after its call had returned. */
static ffi_error *call_deferred(const struct call *call) {
  struct failure *failure = importer ? failure_take() : NULL; /* no other thread leaves operations to a stream */
  if (failure == NULL) return NULL;
  ffi_error *error =
      call_fail(call, failure->code, "not done, because an operation before it has failed: %s", failure->text);
  free(failure);
  return error;
}

ffi_error *entry_run(ffi_frame *frame, const struct operation *operation, const struct memory *memory) {
  if (ffi_answer_metadata(frame)) return NULL;
  struct call call; /* not zeroed as a whole, which would take as long as the rest */
  call.frame = frame;
  call.operation = operation;
  call.comm = NULL;
  call.memory = memory;
  call.stream = NULL;
  call.in = call.out = (struct side){NULL, 0, NULL};
  ffi_error *error;
  if (frame->stage == FFI_STAGE_INSTANTIATE) return check_attributes(&call);
  if (frame->stage != FFI_STAGE_EXECUTE) return NULL;
  decode_attributes(&call);
  call.comm = registry_at(call.attributes[0]);
  if ((error = call_check(&call)) != NULL || (error = find_objects(&call)) != NULL) return error;
  if ((error = call_deferred(&call)) != NULL) return error;
  if ((error = decode_side(&call, &frame->operands, &call.in)) != NULL) return error;
  if ((error = decode_side(&call, &frame->results, &call.out)) != NULL) return error;
  call.compared = false;
  if (atomic_load_explicit(&runtime.check, memory_order_relaxed)) compare_decide(&call);
  call.traced = atomic_load_explicit(&runtime.trace, memory_order_relaxed);
  return memory->host ? call_pieces(&call) : device_run(&call);
}
