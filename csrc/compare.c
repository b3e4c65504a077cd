#include "compare.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "trace.h"

/* The attributes of a collective begin with comm and derivative; behind them may come a reduction and a root. */
enum { FIRST_OWN = 2 };

/* The names of the values of `derivative`, as in python/jaxmpi/_primitive.py. */
static const char *const kinds[] = {"a value", "a tangent", "a cotangent", "a value in a further derivative"};

/* What all ranks pass or receive as much of as each other. */
static const struct side *share_of(const struct call *call) {
  return call->operation->division == SCATTERS || call->in.type == NULL ? &call->out : &call->in;
}

void compare_decide(struct call *call) {
  const struct operation *operation = call->operation;
  call->compared = call->comm->size > 1 && operation->attribute_count >= FIRST_OWN &&
                   operation->attributes[FIRST_OWN - 1].kind == DERIVATIVE;
  call->share = share_of(call)->count;
}

static struct record record_of(struct call *call) {
  const struct operation *operation = call->operation;
  const struct datatype *type = share_of(call)->type;
  struct record record = {.call = (int64_t)atomic_fetch_add(&call->comm->compared, 1) + 1,
                          .operation = operation - runtime.backend->operations,
                          .derivative = call->attributes[FIRST_OWN - 1],
                          .root = -1,
                          .dtype = type != NULL ? type->code : -1,
                          .count = call->share};
  for (int i = FIRST_OWN; i < operation->attribute_count; i++) {
    const struct reduction *reduction = object_of(call->attributes[i]);
    if (operation->attributes[i].kind == SHOWN)
      record.root = call->attributes[i];
    else
      record.reduction = reduction->by == REDUCER_USER ? USERS_REDUCTION : reduction->number;
  }
  return record;
}

/* A record in words. It may be another rank's, and that of another version: nothing in it is relied on. */
static void describe(const struct record *record, char *text, size_t size) {
  const struct operation *rows = runtime.backend->operations;
  const struct datatype *type = datatype_find((int)record->dtype);
  const struct reduction *reduction = registry_at(record->reduction);
  int64_t row = 0;
  size_t length;
  while (row != record->operation && rows[row].name != NULL) row++;
  snprintf(text, size, "%s", rows[row].name != NULL ? rows[row].name : "an unknown operation");
  if (rows[row].name == NULL) return;
#define ADD(...) length = strlen(text), snprintf(text + length, size - length, __VA_ARGS__)
  if (record->reduction == USERS_REDUCTION) ADD(" by a reduction of the user's");
  if (reduction != NULL) ADD(" %.*s", (int)strcspn(reduction->name, " "), reduction->name); /* "SUM of float16" */
  if (record->root >= 0)
    ADD(" %s root %" PRId64, rows[row].division == GATHERS || record->reduction != 0 ? "to" : "from", record->root);
  if (type != NULL) ADD(" of %" PRId64 " %s", record->count, type->name);
  if (type != NULL && record->derivative >= 0 && record->derivative < (int64_t)(sizeof kinds / sizeof *kinds))
    ADD(" (%s)", kinds[record->derivative]);
#undef ADD
}

/* All ranks find the same: an error for each of them, or for none. */
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
  int code = runtime.backend->exchange(call->comm, &mine, all, sizeof mine);
  if (call->traced) trace_end(call, code != 0);
  ffi_error *error = code != 0 ? call_fail_mpi(call, code) : judge(call, &mine, all);
  free(all);
  return error;
}
