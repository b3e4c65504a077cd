#include "call.h"

#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "trace.h"

ffi_error *call_check(const struct call *call) {
  if (runtime.self != NULL && atomic_load_explicit(&runtime.self->freed, memory_order_relaxed))
    return call_fail(call, FFI_FAILED_PRECONDITION, "MPI has been finalized; nothing was sent");
  if (call->comm == NULL) return call_fail_unknown(call, call->operation->attributes[0].name);
  if (atomic_load_explicit(&call->comm->freed, memory_order_relaxed))
    return call_fail(call, FFI_FAILED_PRECONDITION,
                     "the communicator has been freed since this function was compiled; nothing was sent. "
                     "Call it again with a live communicator, or free the communicator later");
  return NULL;
}

ffi_error *call_body(struct call *call) {
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  ffi_error *error = call->compared ? compare_ranks(call) : NULL;
  bool begun = error == NULL;
  if (begun) error = call->operation->body(call);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  if (begun && call->traced) trace_end(call, error != NULL);
  return error;
}

struct division_of call_division(const struct call *call) {
  enum division how = call->operation->division;
  int size = call->comm->size;
  struct division_of d = {.in_rows = how == SCATTERS || how == EXCHANGES ? size : 1,
                          .out_rows = how == GATHERS || how == EXCHANGES ? size : 1};
  int64_t in = call->in.count / d.in_rows, out = call->out.count / d.out_rows, limit = call->comm->piece;
  const struct datatype *type = call->in.type != NULL ? call->in.type : call->out.type;
  d.columns = d.piece = in > out ? in : out;
  d.element = type != NULL ? type->bytes : 0;
  if (limit == 0 || how == WHOLE || how == LOCAL || type == NULL) return d;
  if (how != PIECES) { /* as large a piece for all ranks together, but no message between two of them too short */
    int64_t least = limit < LEAST_COLUMN ? limit : LEAST_COLUMN;
    limit = limit / size > least ? limit / size : least;
  }
  d.piece = limit / (int64_t)d.element;
  return d;
}

void call_cut(struct call *call, const struct division_of *division, int64_t first) {
  int64_t rest = division->columns - first, count = rest < division->piece ? rest : division->piece;
  struct side *sides[2] = {&call->in, &call->out};
  for (int i = 0; i < 2; i++) {
    if (sides[i]->count == 0) continue;
    sides[i]->data = side_at(sides[i], first);
    sides[i]->count = count * (i == 0 ? division->in_rows : division->out_rows);
  }
}

/* Rows of `width` bytes from one matrix to another, whose rows lie so many bytes apart. */
static void copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, int rows) {
  for (int i = 0; i < rows; i++) memcpy(to + (size_t)i * to_pitch, from + (size_t)i * from_pitch, width);
}

/* One piece of a call on host memory. Several rows go through `scratch`, as MPI wants them without gaps. */
static ffi_error *piece_run(const struct call *call, const struct division_of *division, int64_t first, char *scratch) {
  struct call part = *call;
  call_cut(&part, division, first);
  bool gather = division->in_rows > 1 && part.in.count > 0, scatter = division->out_rows > 1 && part.out.count > 0;
  size_t pitch = (size_t)division->columns * division->element;
  size_t in_width = (size_t)(part.in.count / division->in_rows) * division->element;
  size_t out_width = (size_t)(part.out.count / division->out_rows) * division->element;
  char *in = part.in.data, *out = part.out.data;
  if (gather) copy_rows(part.in.data = scratch, in_width, in, pitch, in_width, division->in_rows);
  if (scatter) part.out.data = scratch + (gather ? in_width * (size_t)division->in_rows : 0);
  ffi_error *error = call_body(&part);
  if (scatter && error == NULL) copy_rows(out, pitch, part.out.data, out_width, out_width, division->out_rows);
  return error; /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

ffi_error *call_pieces(struct call *call) {
  if (call->comm->piece == 0) return call_body(call);
  struct division_of division = call_division(call);
  if (division.columns <= division.piece) return call_body(call);
  int rows = (division.in_rows > 1 ? division.in_rows : 0) + (division.out_rows > 1 ? division.out_rows : 0);
  char *scratch = rows > 0 ? malloc((size_t)rows * (size_t)division.piece * division.element) : NULL;
  if (rows > 0 && scratch == NULL) return call_fail(call, FFI_INTERNAL, "no memory for a piece");
  ffi_error *error = NULL;
  for (int64_t first = 0; first < division.columns && error == NULL; first += division.piece) {
    error = piece_run(call, &division, first, scratch);
    call->compared = false;
  }
  free(scratch);
  return error;
}

ffi_error *call_zero(const struct call *call, void *data, size_t bytes) {
  int code = 0;
  if (call->memory->host)
    memset(data, 0, bytes);
  else
    code = call->memory->zero(data, bytes, call->stream);
  return code == 0 ? NULL : call_fail_driver(call, call->memory, code);
}

ffi_error *call_copy(const struct call *call, void *to, const void *from, size_t bytes) {
  int code = 0;
  if (call->memory->host)
    memcpy(to, from, bytes);
  else
    code = call->memory->copy(to, from, bytes, call->stream);
  return code == 0 ? NULL : call_fail_driver(call, call->memory, code);
}
