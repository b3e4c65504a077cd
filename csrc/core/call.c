#include "core/call.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compare.h"
#include "core/deadline.h"
#include "core/log.h"
#include "core/requests.h"
#include "core/timeline.h"
#include "core/watch.h"

ffi_error *call_check(const struct call *call) {
  if (runtime_has_ended()) return call_fail(call, FFI_FAILED_PRECONDITION, "%s; nothing was sent", runtime.ended);
  if (call->comm == NULL) return call_fail_unknown(call, "comm");
  /* What is in flight on a communicator is completed even if that has been freed. */
  if (atomic_load_explicit(&call->comm->freed, memory_order_relaxed) && !waits_for_request(call->operation->row))
    return call_fail(call, FFI_FAILED_PRECONDITION,
                     "the communicator has been freed since this function was compiled; nothing was sent. "
                     "Call it again with a live communicator, or free the communicator later");
  return NULL;
}

static inline ffi_error *body(struct call *call) {
  struct watched *record = waits_for_request(call->operation->row) ? NULL : watch_begin(call);
  requests_before(call);
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  ffi_error *error = call->compared ? compare_ranks(call) : NULL;
  bool begun = error == NULL;
  if (begun) call_begun(call);
  if (begun) error = runtime.abi->bodies[call->operation->row](call);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  error = call_done(call, error);
  if (deadlines_on() && begun && error == NULL) deadline_note_done(call);
  watch_end(record);
  if (begun && call->logged) log_end(call, error != NULL);
  return error;
}

static __attribute__((noinline)) ffi_error *body_recorded(struct call *call) {
  call->from = -1, call->request = 0;
  bool recorded = timeline_begin(call);
  ffi_error *error = body(call);
  if (recorded) timeline_end(call, error != NULL);
  return error;
}

/* What Python passes in the place of MPI.ANY_SOURCE where the messages must have one source, and of a number that 32
 * bits do not hold. */
#define ANY_OF_SEVERAL INT32_MIN
#define TOO_LARGE      (INT32_MIN + 1)

/* The error for a number that is no rank or no tag. `first`: as in find_end. `any`: whether it may be any. */
static ffi_error *fail_end(const struct call *call, int index, int64_t value, int64_t first, bool any) {
  const char *name = call->operation->attributes[index].name;
  char given[32] = "more than 32 bits hold";
  if (value != TOO_LARGE) snprintf(given, sizeof given, "%" PRId64, value);
  if (call->operation->attributes[index].kind == TAG)
    return call_fail(call, FFI_INVALID_ARGUMENT, "%s is %s, and must be between 0 and %" PRId64 "%s; nothing was sent",
                     name, given, runtime.most_tag - first,
                     first > 0 ? " in a derivative (on whose way back sendtag and recvtag are exchanged)" : "");
  return call_fail(call, FFI_INVALID_ARGUMENT,
                   "%s is %s, and must be a rank of the communicator, 0 to %d, or MPI.PROC_NULL%s; nothing was sent",
                   name, given, call->comm->size - 1,
                   value == ANY_OF_SEVERAL
                       ? " (it stands for MPI.ANY_SOURCE: with a pytree of several arrays the source must be a rank)"
                   : any       ? " or MPI.ANY_SOURCE"
                   : first > 0 ? ", so that the way back of a derivative is known (where source and dest are exchanged)"
                               : "");
}

/* Replaces a rank or tag that is TRACED by its value. */
static ffi_error *find_end(struct call *call, int index, int64_t value) {
  const char *name = call->operation->attributes[index].name;
  const struct abi *abi = runtime.abi;
  int row = call->operation->row;
  int64_t *attribute = &call->attributes[index], first = *attribute - TRACED; /* 0, or what a derivative adds */
  if (call->operation->attributes[index].kind == RANK) {
    bool any = strcmp(name, "source") == 0 && first == 0;
    *attribute = value;
    if ((value >= 0 && value < call->comm->size) || value == abi->proc_null || (any && value == abi->any_source))
      return NULL;
    return fail_end(call, index, value, first, any);
  }
  /* In a derivative the message is to be the one that belongs to that of the function. */
  bool receives = (row == ROW_recv || row == ROW_irecv) && first == 0;
  bool any = value == abi->any_tag && (receives || strcmp(name, "recvtag") == 0);
  *attribute = any ? value : value + first;
  if (any || (value >= 0 && value + first <= runtime.most_tag)) return NULL;
  return fail_end(call, index, value, first, any);
}

static __attribute__((noinline)) ffi_error *find_ends(struct call *call) {
  const struct buffer *next = &call->buffers[call->first[call->operation->buffer_count - 1]];
  const struct buffer *end = &call->buffers[call->buffer_count];
  call->ends = false;
  for (int i = 0; i < call->operation->attribute_count; i++) {
    enum attribute kind = call->operation->attributes[i].kind;
    if ((kind != RANK && kind != TAG) || !is_traced(call->attributes[i])) continue;
    if (next == end || next->count != 1 || next->type->code != FFI_DTYPE_S32)
      return call_fail(call, FFI_INTERNAL, "a rank or tag is not passed: reinstall jaxmpi");
    ffi_error *error = find_end(call, i, *(const int32_t *)(next++)->data);
    if (error != NULL) return error;
  }
  return NULL;
}

ffi_error *call_body(struct call *call) {
  ffi_error *error = call->ends ? find_ends(call) : NULL;
  if (error != NULL) return error;
  return atomic_load_explicit(&timeline_on, memory_order_relaxed) ? body_recorded(call) : body(call);
}

/* The columns of MPI's buffers and the bytes of an element. False: these differ between the buffers, or there is no
 * such buffer, and the call is not divided. */
static bool columns_of(const struct call *call, int64_t *columns, size_t *element) {
  *columns = 0, *element = 0;
  for (int i = 0; i < call->buffer_count; i++) {
    const struct buffer *buffer = &call->buffers[i];
    if (buffer->type == NULL || role_is_of_host(buffer->role)) continue;
    int64_t own = buffer->count / call_rows(call, buffer);
    if (*element > 0 && (own != *columns || buffer->type->bytes != *element)) return false;
    *columns = own;
    *element = buffer->type->bytes;
  }
  return *element > 0;
}

void call_divide(struct call *call) {
  enum divisibility how = call->operation->divisibility;
  int size = call->comm->size;
  int64_t limit = call->comm->chunk, columns;
  size_t element;
  call->division = (struct division){.rows_read = how == SCATTERS || how == EXCHANGES ? size : 1,
                                     .rows_written = how == GATHERS || how == EXCHANGES ? size : 1};
  if (limit == 0 || how == WHOLE || call->leaves != NULL || !columns_of(call, &columns, &element)) return;
  if (how != CHUNKS) { /* a chunk has a part for each rank; a part is a message, which must not get too short */
    int64_t least = limit < LEAST_COLUMN ? limit : LEAST_COLUMN;
    limit = limit / size > least ? limit / size : least;
  }
  call->division.columns = columns;
  call->division.chunk = limit / (int64_t)element;
}

void call_cut(struct call *call, int64_t first) {
  const struct division *division = &call->division;
  int64_t rest = division->columns - first, count = rest < division->chunk ? rest : division->chunk;
  for (int i = 0; i < call->buffer_count; i++) {
    struct buffer *buffer = &call->buffers[i];
    if (buffer->count == 0 || role_is_of_host(buffer->role)) continue;
    buffer->data = buffer_at(buffer, first);
    buffer->count = count * call_rows(call, buffer);
  }
}

/* Copies rows of `width` bytes between matrices whose rows begin `pitch` bytes apart. */
static void copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, int rows) {
  for (int i = 0; i < rows; i++) memcpy(to + (size_t)i * to_pitch, from + (size_t)i * from_pitch, width);
}

/* Copies the buffers of a chunk that have several rows to `scratch`, without gaps, as MPI needs them; or back. */
static void pack(struct call *part, const struct call *whole, char *scratch, bool back) {
  for (int i = 0; i < part->buffer_count; i++) {
    struct buffer *buffer = &part->buffers[i];
    int rows = call_rows(part, buffer);
    if (rows == 1 || buffer->count == 0) continue;
    size_t bytes = buffer_bytes(buffer), width = bytes / (size_t)rows;
    size_t pitch = (size_t)whole->division.columns * buffer->type->bytes;
    bool written = role_is_written(buffer->role);
    if (!back && !written) copy_rows(scratch, width, buffer->data, pitch, width, rows);
    if (back && written) copy_rows(buffer->data, pitch, scratch, width, width, rows);
    if (!back) buffer->data = scratch;
    scratch += bytes;
  }
}

/* Executes one chunk of a call on host memory. */
static ffi_error *chunk_run(const struct call *call, int64_t first, char *scratch) {
  struct call part, packed;
  call_copy(&part, call);
  call_cut(&part, first);
  if (scratch == NULL) return call_body(&part);
  call_copy(&packed, &part);
  pack(&packed, call, scratch, false);
  ffi_error *error = call_body(&packed);
  if (error == NULL) pack(&part, call, scratch, true);
  return error; /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

static struct scratch *_Atomic spare;

struct scratch *scratch_take(size_t bytes) {
  struct scratch *scratch = atomic_exchange(&spare, NULL);
  if (scratch != NULL && scratch->bytes >= bytes) return scratch;
  free(scratch);
  scratch = malloc(sizeof *scratch + bytes);
  if (scratch != NULL) scratch->bytes = bytes;
  return scratch;
}

void scratch_give(struct scratch *scratch) { free(atomic_exchange(&spare, scratch)); }

/* Bytes of a chunk in all buffers that have several rows. */
static size_t scratch_for(const struct call *call) {
  size_t bytes = 0;
  for (int i = 0; i < call->buffer_count; i++) {
    int rows = call_rows(call, &call->buffers[i]);
    if (rows > 1 && call->buffers[i].count > 0)
      bytes += (size_t)rows * (size_t)call->division.chunk * call->buffers[i].type->bytes;
  }
  return bytes;
}

ffi_error *call_join(const struct call *leaves, struct call *call) {
  memcpy(call, leaves, offsetof(struct call, first));
  call->leaves = leaves;
  call->buffer_count = (short)leaves->operation->buffer_count;
  call->first[call->buffer_count] = call->buffer_count;
  for (short i = 0; i < call->buffer_count; i++) {
    int count;
    const struct buffer *leaf = leaves_of(call, i, &count);
    struct buffer *whole = &call->buffers[i];
    call->first[i] = i;
    *whole = (struct buffer){NULL, 0, leaf->type, leaf->role};
    for (int k = 0; k < count; k++) {
      if (leaf[k].type != whole->type)
        return call_fail(call, FFI_INTERNAL, "arrays of %s and of %s in one call: reinstall jaxmpi", whole->type->name,
                         leaf[k].type->name);
      whole->count += leaf[k].count;
    }
  }
  return NULL;
}

/* Copies the leaves of a buffer into it, or back. Each row of a matrix has a row of each leaf. */
static void move_leaves(const struct call *call, int buffer, bool back) {
  const struct buffer *whole = &call->buffers[buffer];
  int count, rows = call_rows(call, whole);
  const struct buffer *leaf = leaves_of(call, buffer, &count);
  size_t pitch = buffer_bytes(whole) / (size_t)rows;
  char *at = whole->data;
  for (int k = 0; k < count; k++) {
    size_t width = buffer_bytes(&leaf[k]) / (size_t)rows;
    if (width > 0 && back) copy_rows(leaf[k].data, width, at, pitch, width, rows);
    if (width > 0 && !back) copy_rows(at, pitch, leaf[k].data, width, width, rows);
    at += width;
  }
}

ffi_error *call_leaves(struct call *call) {
  size_t bytes[2] = {0, 0}; /* in the order of the buffers: first those that are read */
  for (int i = 0; i < call->buffer_count; i++)
    bytes[role_is_written(call->buffers[i].role)] += buffer_bytes(&call->buffers[i]);
  bool in_place = call->operation->divisibility == CHUNKS && bytes[0] == bytes[1];
  struct scratch *scratch = scratch_take(bytes[0] + bytes[1]);
  if (scratch == NULL) return call_fail(call, FFI_INTERNAL, "no memory to join %zu bytes", bytes[0] + bytes[1]);
  for (int i = 0; i < call->buffer_count; i++) {
    bool written = role_is_written(call->buffers[i].role);
    call->buffers[i].data = scratch->data + (written && !in_place ? bytes[0] : 0);
    if (!written) move_leaves(call, i, false);
  }
  ffi_error *error = call_body(call);
  for (int i = 0; i < call->buffer_count && error == NULL; i++)
    if (role_is_written(call->buffers[i].role)) move_leaves(call, i, true);
  scratch_give(scratch);
  return error;
}

ffi_error *call_chunks(struct call *call) {
  if (division_is_one(&call->division)) return call_body(call);
  size_t bytes = scratch_for(call);
  struct scratch *scratch = bytes > 0 ? scratch_take(bytes) : NULL;
  if (bytes > 0 && scratch == NULL) return call_fail(call, FFI_INTERNAL, "no memory for a chunk");
  ffi_error *error = NULL;
  for (int64_t first = 0; first < call->division.columns && error == NULL; first += call->division.chunk) {
    error = chunk_run(call, first, scratch != NULL ? scratch->data : NULL);
    call->compared = false;
  }
  if (scratch != NULL) scratch_give(scratch);
  return error;
}
