#include "execute/entry.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/failure.h"
#include "execute/body.h"
#include "execute/chunks.h"
#include "requests/table.h"

/* The rows of ops.def once more, here: the code below is compiled for each row, with all members as constants. */
#define OPERATION_ROWS static const struct operation rows[]
#include "core/operation_rows.def"

_Thread_local unsigned done_here;

/* --- from a frame to a call ---
 *
 * The code of an execution is inlined in the handler of each row. There the compiler knows the number of attributes and
 * buffers and their use. That halves the instructions until MPI is called. */
#define INLINED  static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 7")

/* Checks that XLA passes what the Python side has lowered; otherwise two versions of the package are mixed. Checked
 * once, when XLA instantiates a program; executions rely on it. */
static ffi_error *check_attributes(const struct call *call) {
  const ffi_attributes *passed = &call->frame->attributes;
  const struct operation *operation = call->operation;
  if (passed->size != operation->attribute_count)
    return call_fail(call, FFI_INTERNAL, "%" PRId64 " attributes where the core expects %d: reinstall jaxmpi",
                     passed->size, operation->attribute_count);
  for (int i = 0; i < operation->attribute_count; i++) {
    const char *name = operation->attributes[i].name;
    const ffi_span *span = passed->names[i];
    const ffi_scalar *scalar = passed->values[i];
    if (passed->types[i] != FFI_ATTRIBUTE_SCALAR || scalar->dtype != FFI_DTYPE_S64 || span->size != strlen(name) ||
        memcmp(span->data, name, span->size) != 0)
      return call_fail(call, FFI_INTERNAL, "attribute %d is not the integer %s: reinstall jaxmpi", i, name);
  }
  return NULL;
}

INLINED void decode_attributes(struct call *call, const struct operation *operation) {
  ffi_scalar *const *scalars = (ffi_scalar *const *)call->frame->attributes.values;
  UNROLLED for (int i = 0; i < operation->attribute_count; i++)
      memcpy(&call->attributes[i], scalars[i]->value, sizeof(int64_t));
}

/* Find the communicator and check that it can be used. */
INLINED ffi_error *find_communicator(struct call *call, const struct operation *operation) {
  int64_t *attribute = &call->attributes[operation->comm];
  call->comm = registry_at(*attribute);
  *attribute = (int64_t)(intptr_t)call->comm;
  return call_check(call);
}

/* Replace the number of each other object by the address. */
INLINED ffi_error *find_objects(struct call *call, const struct operation *operation) {
  call->reducer = REDUCER_MPI;
  UNROLLED for (int i = 0; i < operation->attribute_count; i++) {
    int64_t *attribute = &call->attributes[i];
    enum attribute kind = operation->attributes[i].kind;
    if (i == operation->comm || !attribute_is_object(kind)) continue;
    if (kind == KIND_OBJECT_OR_0 && *attribute == 0) continue;
    void *object = registry_at(*attribute);
    if (object == NULL) return call_fail_unknown(call, operation->attributes[i].name);
    *attribute = (int64_t)(intptr_t)object;
    if (kind != KIND_REDUCTION) continue;
    const struct reduction *reduction = object;
    call->reducer = reduction->by;
    if (reduction_is_freed(reduction))
      return call_fail(call, FFI_FAILED_PRECONDITION,
                       "the operation that reduces, %s, has been freed since this function was compiled; nothing was "
                       "sent. Call it again with a live one, or free the operation later",
                       reduction->name);
  }
  return NULL;
}

INLINED ffi_error *decode_buffer(const struct call *call, const ffi_buffer *passed, struct buffer *buffer) {
  buffer->data = passed->data;
  buffer->count = ffi_count(passed);
  buffer->type = datatype_find(passed->dtype);
  if (buffer->type == NULL || !runtime.known[passed->dtype])
    return call_fail(call, FFI_UNIMPLEMENTED, "XLA's data type number %d cannot be communicated", passed->dtype);
  return NULL;
}

/* The operands ([0]) or the results ([1]) of a frame, without the token of the ordered effect. */
struct direction {
  ffi_buffer *const *next;
  int64_t given, each; /* all buffers; the buffers of the list among them */
  bool without_mpis;   /* this rank passes no buffer for MPI */
};

/* False: no operation passes that many. */
INLINED bool direction_begin(const struct operation *operation, const ffi_frame *frame, bool written,
                             struct direction *d) {
  const ffi_buffers *passed = written ? &frame->results : &frame->operands;
  int fixed = 0, of_host = 0; /* buffers that are not in a list; the core's among them */
  bool list = false, joined = false, partly = false;
  UNROLLED for (int i = 0; i < operation->buffer_count; i++) {
    if (role_is_written(operation->buffers[i].role) != written) continue;
    fixed += !operation->buffers[i].each;
    of_host += !operation->buffers[i].each && role_is_of_host(operation->buffers[i].role);
    list |= operation->buffers[i].each;
    joined |= operation->buffers[i].joined;
    partly |= operation->buffers[i].partly;
  }
  d->next = (ffi_buffer *const *)passed->buffers;
  d->given = passed->size;
  if (d->given > 0 && d->next[d->given - 1]->dtype == FFI_DTYPE_TOKEN) d->given--;
  d->each = d->given - fixed;
  d->without_mpis = partly && d->given == of_host;
  return d->without_mpis || (list ? d->each >= joined : d->each == 0);
}

static ffi_error *fail_number(const struct call *call, const struct direction *d, bool written) {
  return call_fail(call, FFI_INTERNAL, "%" PRId64 " %s where the core expects %d: reinstall jaxmpi", d->given,
                   written ? "results" : "operands", (int)(d->given - d->each));
}

INLINED bool is_joined(const struct operation *operation) {
  bool joined = false;
  UNROLLED for (int i = 0; i < operation->buffer_count; i++) joined |= operation->buffers[i].joined;
  return joined;
}

/* `lists`: there may be lists of any length; otherwise each list has one buffer or none. */
INLINED ffi_error *decode_roles(struct call *call, const struct operation *operation, struct direction directions[2],
                                bool lists) {
  struct buffer *next = call->buffers;
  UNROLLED for (int i = 0; i < operation->buffer_count; i++) {
    enum role role = operation->buffers[i].role;
    bool each = operation->buffers[i].each;
    struct direction *d = &directions[role_is_written(role)];
    call->first[i] = (short)(next - call->buffers);
    int64_t passed = d->without_mpis && !role_is_of_host(role) ? 0 : each && lists ? d->each : 1;
    if (passed == 0 && (!each || operation->buffers[i].joined))
      *next++ = (struct buffer){NULL, 0, NULL, role}; /* so that the body has a buffer */
    for (; passed > 0; passed--, next++) {
      ffi_error *error = decode_buffer(call, *d->next++, next);
      if (error != NULL) return error;
      next->role = role;
    }
  }
  call->first[operation->buffer_count] = call->buffer_count = (short)(next - call->buffers);
  return NULL;
}

/* Decode the buffers, in the order of ops.def. */
INLINED ffi_error *decode_buffers(struct call *call, const struct operation *operation) {
  struct direction directions[2];
  for (int written = 0; written < 2; written++)
    if (!direction_begin(operation, call->frame, written, &directions[written]))
      return fail_number(call, &directions[written], written);
  if (is_joined(operation) && directions[0].each <= 1 && directions[1].each <= 1) /* as nearly always */
    return decode_roles(call, operation, directions, false);
  if (directions[0].given + directions[1].given + operation->buffer_count > MAX_BUFFERS)
    return call_fail(call, FFI_UNIMPLEMENTED,
                     "%" PRId64 " arrays in one call, and more than some %d are not possible: divide the pytree",
                     directions[0].given + directions[1].given, MAX_BUFFERS - operation->buffer_count);
  return decode_roles(call, operation, directions, true);
}

INLINED bool has_traced(const struct call *call, const struct operation *operation) {
  bool message = false;
  UNROLLED for (int i = 0; i < operation->attribute_count; i++) message |= operation->attributes[i].kind == KIND_TAG;
  return message && call->first[operation->buffer_count - 1] < call->buffer_count;
}

/* The error for a call that follows a deferred error: see failure.h. */
static ffi_error *call_deferred(const struct call *call) {
  struct failure *failure = failure_of_thread();
  if (failure == NULL) return NULL;
  ffi_error *error =
      call_fail(call, failure->code, "not done, because an operation before it has failed: %s", failure->text);
  free(failure);
  return error;
}

static __attribute__((noinline)) ffi_error *run_joined(const struct call *leaves) {
  struct call call;
  ffi_error *error = call_join(leaves, &call);
  if (error != NULL) return error;
  call_settle(&call);
  call_divide(&call);
  return call.memory->run(&call); /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

INLINED ffi_error *run_operation(ffi_frame *frame, int row, const struct memory *memory) {
  if (ffi_answer_metadata(frame)) return NULL;
  struct call call; /* zeroing all of it would take as long as the rest of the call */
  call.frame = frame;
  const struct operation *operation = &rows[row];
  call.operation = &operation_table[row];
  call.comm = NULL;
  call.memory = memory;
  call.stream = NULL;
  call.leaves = NULL;
  call.buffer_count = 0;
  ffi_error *error;
  if (frame->stage == FFI_STAGE_INSTANTIATE) {
    memset(call.attributes, 0, sizeof call.attributes); /* an error names the call */
    return check_attributes(&call);
  }
  if (frame->stage != FFI_STAGE_EXECUTE) return NULL;
  if (row == ROW_after) return NULL; /* the operands are there: that is all */
  if (row == ROW_done) return done_here += memory->host, NULL;
  decode_attributes(&call, operation);
  if ((error = find_communicator(&call, operation)) != NULL || (error = find_objects(&call, operation)) != NULL)
    return error;
  if ((error = call_deferred(&call)) != NULL || (error = decode_buffers(&call, operation)) != NULL) return error;
  call.reads_envelope = has_traced(&call, operation);
  if (is_joined(operation) && call.buffer_count > operation->buffer_count) return run_joined(&call);
  call_settle(&call);
  if (memory->host && call.comm->chunk == 0 && !call.by_nccl) return call_body(&call); /* as nearly always */
  call_divide(&call);
  return memory->run(&call); /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

static __attribute__((noinline)) ffi_error *abandon_failed(const ffi_frame *frame, ffi_error *error) {
  if (frame->stage == FFI_STAGE_EXECUTE) requests_abandon(ffi_run(frame));
  return error;
}

#define OPERATION(name, engine, divisibility, buffers, attributes)         \
  ffi_error *entry_##name(ffi_frame *frame, const struct memory *memory) { \
    ffi_error *error = run_operation(frame, ROW_##name, memory);           \
    return error == NULL ? NULL : abandon_failed(frame, error);            \
  }
#include "core/ops.def"
#undef OPERATION
