#include "core/compare.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/failure.h"
#include "core/trace.h"

const char *derivative_name(int64_t derivative) {
  /* In the order of _DERIVATIVES in python/jaxmpi/_primitive.py. */
  static const char *const names[] = {"a value", "a tangent", "a cotangent", "a value in a further derivative"};
  return derivative >= 0 && derivative < (int64_t)(sizeof names / sizeof *names) ? names[derivative] : NULL;
}

/* Sets the elements and the type of this rank's share: of the buffers, read or written, that have the same size on all
 * ranks. */
static void find_share(struct call *call) {
  int64_t counts[2] = {0, 0};
  const struct datatype *types[2] = {NULL, NULL};
  for (int i = 0; i < call->buffer_count; i++) {
    const struct buffer *buffer = &call->buffers[i];
    if (buffer->type == NULL || role_is_of_host(buffer->role)) continue;
    bool written = role_is_written(buffer->role);
    counts[written] += buffer->count;
    if (types[written] == NULL) types[written] = buffer->type;
  }
  bool written = call->operation->divisibility == SCATTERS || types[0] == NULL;
  call->share_type = types[written];
  call->share = counts[written];
}

/* Index of the attribute `derivative`, which every collective has; -1: not a collective. */
static int derivative_of(const struct operation *operation) {
  int i = operation->attribute_count - 1;
  while (i >= 0 && operation->attributes[i].kind != DERIVATIVE) i--;
  return i;
}

void compare_decide(struct call *call) {
  call->compared = call->comm->size > 1 && derivative_of(call->operation) >= 0;
  find_share(call);
}

static struct record record_of(struct call *call) {
  const struct operation *operation = call->operation;
  const struct datatype *type = call->share_type;
  struct record record = {.call = (int64_t)atomic_fetch_add(&call->comm->compared, 1) + 1,
                          .operation = operation->row,
                          .derivative = call->attributes[derivative_of(operation)],
                          .root = -1,
                          .dtype = type != NULL ? type->code : -1,
                          .count = call->share};
  for (int i = 0; i < operation->attribute_count; i++) {
    if (operation->attributes[i].kind == RANK) record.root = call->attributes[i];
    if (operation->attributes[i].kind != REDUCTION) continue;
    const struct reduction *reduction = object_of(call->attributes[i]);
    record.reduction = reduction->by == REDUCER_USER ? USERS_REDUCTION : reduction->number;
  }
  return record;
}

/* A record in words. It may come from a rank with another version of the package, so its values are not trusted. */
static void describe(const struct record *record, char *text, size_t size) {
  const struct datatype *type = datatype_find((int)record->dtype);
  const struct reduction *reduction = registry_at(record->reduction);
  size_t length;
  if (record->operation < 0 || record->operation >= OPERATION_COUNT) {
    snprintf(text, size, "an unknown operation");
    return;
  }
  const struct operation *row = &operation_table[record->operation];
  snprintf(text, size, "%s", row->name);
#define ADD(...) length = strlen(text), snprintf(text + length, size - length, __VA_ARGS__)
  if (record->reduction == USERS_REDUCTION) ADD(" by a reduction of the user's");
  if (reduction != NULL) ADD(" %.*s", (int)strcspn(reduction->name, " "), reduction->name); /* "SUM of float16" */
  if (record->root >= 0)
    ADD(" %s root %" PRId64, row->divisibility == GATHERS || record->reduction != 0 ? "to" : "from", record->root);
  if (type != NULL) ADD(" of %" PRId64 " %s", record->count, type->name);
  if (type != NULL && derivative_name(record->derivative) != NULL) ADD(" (%s)", derivative_name(record->derivative));
#undef ADD
}

/* All ranks come to the same verdict: an error on each of them, or on none. */
static ffi_error *judge(const struct call *call, const struct record *mine, const struct record *all) {
  char here[256], there[256], at[64] = "calls";
  int other = 0;
  while (other < call->comm->size && memcmp(&all[other], mine, sizeof *mine) == 0) other++;
  if (other == call->comm->size) return NULL;
  describe(mine, here, sizeof here);
  describe(&all[other], there, sizeof there);
  if (all[other].call != mine->call) snprintf(at, sizeof at, "is at call %" PRId64 ",", all[other].call);
  return call_fail(call, FFI_FAILED_PRECONDITION,
                   "the ranks differ: this is call %" PRId64
                   " on this communicator: %s; rank %d %s %s. Nothing of it was sent",
                   mine->call, here, other, at, there);
}

ffi_error *compare_ranks(struct call *call) {
  struct record mine = record_of(call), *all = calloc((size_t)call->comm->size, sizeof *all);
  if (all == NULL) return call_fail(call, FFI_INTERNAL, "no memory to compare what the ranks do");
  call->function = "MPI_Allgather";
  if (call->traced) trace_begin(call, "to compare %s, call %" PRId64 ", and", call->operation->name, mine.call);
  int code = runtime.abi->exchange(call->comm, &mine, all, sizeof mine);
  if (call->traced) trace_end(call, code != 0);
  ffi_error *error = code != 0 ? call_fail_mpi(call, code) : judge(call, &mine, all);
  free(all);
  return error;
}
