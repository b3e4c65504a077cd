#include "execute/chunks.h"

#include <stdlib.h>
#include <string.h>

#include "core/failure.h"
#include "execute/body.h"

/* Bytes of the smallest part of a chunk that belongs to one rank. */
enum { LEAST_COLUMN = 1 << 14 };

/* The columns of MPI's buffers and the bytes of an element. False: these differ between the buffers, or MPI has no
 * buffer, and the call is not divided. */
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
  call->division = (struct division){.rows_read = how == DIVIDE_SCATTERS || how == DIVIDE_EXCHANGES ? size : 1,
                                     .rows_written = how == DIVIDE_GATHERS || how == DIVIDE_EXCHANGES ? size : 1};
  if (limit == 0 || how == DIVIDE_WHOLE || call->leaves != NULL || !columns_of(call, &columns, &element)) return;
  if (how != DIVIDE_CHUNKS) { /* a chunk has a part for each rank; a part is a message, which must not get too short */
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

/* Copy rows of `width` bytes between matrices whose rows begin `pitch` bytes apart. */
static void copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, int rows) {
  for (int i = 0; i < rows; i++) memcpy(to + (size_t)i * to_pitch, from + (size_t)i * from_pitch, width);
}

/* Copy the buffers of a chunk that have several rows to `scratch`, without gaps, as MPI needs them; or back. */
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

/* Execute one chunk of a call on host memory. */
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
  scratch = aligned_alloc(64, (sizeof *scratch + bytes + 63) / 64 * 64);
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

/* Copy the leaves of a buffer into it, or back. Each row of a matrix has a row of each leaf. */
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
  size_t bytes[2] = {0, 0}; /* in the order of the buffers: first the buffers that are read */
  for (int i = 0; i < call->buffer_count; i++)
    bytes[role_is_written(call->buffers[i].role)] += buffer_bytes(&call->buffers[i]);
  bool in_place = call->operation->divisibility == DIVIDE_CHUNKS && bytes[0] == bytes[1];
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
    call->comparison.due = false;
  }
  if (scratch != NULL) scratch_give(scratch);
  return error;
}
