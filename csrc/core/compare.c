#include "core/compare.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/failure.h"
#include "core/log.h"
#include "core/plan.h"
#include "core/words.h"

/* Sets the elements and the type of this rank's share: of the buffers, read or written, that have the same size on all
 * ranks. */
static void find_share(struct call *call) {
  call->share = 0, call->share_type = NULL, call->share_written = false;
  if (plan_of(call) != NULL) return; /* of arrays of other sizes on other ranks */
  int row = attribute_of(call->operation, NUMBER);
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
  call->share = row >= 0 ? call->attributes[row] : counts[written]; /* of arrays divided by rows, a row */
  call->share_written = written;
  const struct datatype *type = array_not_passed(call->operation, call->attributes, &call->share);
  if (type != NULL) call->share_type = type;
}

void compare_decide(struct call *call) {
  bool collective = attribute_of(call->operation, DERIVATIVE) >= 0; /* which all of them have */
  call->compared = call->comm->size > 1 && collective;
  call->labelled = !collective && call->memory->host;
  find_share(call);
}

/* FNV-1a, by words. */
#define HASH_START UINT64_C(0xcbf29ce484222325)
static uint64_t hash_add(uint64_t hash, int64_t word) { return (hash ^ (uint64_t)word) * UINT64_C(0x100000001b3); }

/* The arrays of a joined call, and a hash of the sizes of their shares. */
static void record_arrays(const struct call *call, struct record *record) {
  for (int i = 0; i < call->buffer_count; i++) {
    int count;
    const struct buffer *leaf = leaves_of(call, i, &count);
    if (role_is_written(call->buffers[i].role) != call->share_written) continue;
    uint64_t hash = HASH_START;
    for (int k = 0; k < count; k++) hash = hash_add(hash, leaf[k].count);
    record->arrays = count;
    record->sizes = (int64_t)hash;
  }
}

/* A hash of the numbers of rows, if all ranks pass the same. */
static int64_t hash_of_counts(const struct call *call) {
  const struct buffer *counts = NULL;
  for (int i = 0; i < call->buffer_count; i++) {
    if (call->buffers[i].role != HOST_READ) continue;
    if (counts != NULL) return 0; /* those sent and those received are each rank's own */
    counts = &call->buffers[i];
  }
  uint64_t hash = HASH_START;
  for (size_t i = 0; counts != NULL && i < buffer_bytes(counts); i++)
    hash = hash_add(hash, ((const unsigned char *)counts->data)[i]);
  return (int64_t)hash;
}

static struct record record_of(struct call *call) {
  const struct operation *operation = call->operation;
  const struct datatype *type = call->share_type;
  struct record record = {.call = (int64_t)atomic_fetch_add(&call->comm->compared, 1) + 1,
                          .operation = operation->row,
                          .derivative = call->attributes[attribute_of(operation, DERIVATIVE)],
                          .root = -1,
                          .dtype = type != NULL ? type->code : -1,
                          .count = call->share};
  if (call->leaves != NULL) record_arrays(call, &record);
  if (plan_of(call) != NULL) {
    record.arrays = plan_of(call)->arrays;
    record.sizes = (int64_t)plan_of(call)->signature;
  }
  if (attribute_of(operation, NUMBER) >= 0) record.sizes = hash_of_counts(call);
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
    ADD(" %s root %" PRId64,
        row->divisibility == GATHERS || row->row == ROW_gatherv || record->reduction != 0 ? "to" : "from",
        record->root);
  bool rows = attribute_of(row, NUMBER) >= 0;
  if (type != NULL) ADD(" of %s%" PRId64 " %s", rows ? "rows of " : "", record->count, type->name);
  if (record->arrays > 0) ADD(" in %" PRId64 " array%s", record->arrays, record->arrays > 1 ? "s" : "");
  if ((type != NULL || record->arrays > 0) && derivative_name(record->derivative) != NULL)
    ADD(" (%s)", derivative_name(record->derivative));
#undef ADD
}

/* The lines of the program that make such calls. */
static void find_lines(const struct call *call, char *lines, size_t size) {
  struct text text = {0, ""};
  int64_t words[WORDS] = {0};
  words_of(call, words);
  words_lines(&text, "called at ", words);
  snprintf(lines, size, "%s", text.characters);
}

struct label label_of(const struct call *call, const struct buffer *buffer) {
  struct label label = {.magic = LABEL_MAGIC, .dtype = buffer->type->code, .count = buffer->count};
  find_lines(call, label.lines, sizeof label.lines);
  return label;
}

const struct label *label_find(const void *message, int64_t bytes) {
  const struct label *label = message;
  return bytes >= (int64_t)sizeof *label && label->magic == LABEL_MAGIC ? label : NULL;
}

enum { LINES = 512 }; /* bytes of what a rank tells */

/* Lines of the programs of two ranks, or nothing, each with a blank in front. */
struct lines {
  char here[LINES + 1], there[LINES + 1];
};

/* Every rank tells its lines to all others. Without memory, or if MPI fails, there are none. */
static void exchange_lines(const struct call *call, int other, struct lines *lines) {
  char mine[LINES] = "", (*all)[LINES] = calloc((size_t)call->comm->size, sizeof *all);
  find_lines(call, mine, sizeof mine);
  lines->here[0] = lines->there[0] = '\0';
  if (mine[0] != '\0') snprintf(lines->here, sizeof lines->here, " %s", mine);
  bool told = all != NULL && runtime.abi->exchange(call->comm, mine, all, sizeof mine) == 0;
  if (told && strncmp(all[other], "called at ", 10) == 0) /* another version may tell something else */
    snprintf(lines->there, sizeof lines->there, " %.*s", LINES - 1, all[other]);
  free(all);
}

/* All ranks come to the same verdict: an error on each of them, or on none. */
static ffi_error *judge(const struct call *call, const struct record *mine, const struct record *all) {
  char here[256], there[256 + 48], at[64] = "calls";
  struct lines lines;
  int other = 0;
  while (other < call->comm->size && memcmp(&all[other], mine, sizeof *mine) == 0) other++;
  if (other == call->comm->size) return NULL;
  describe(mine, here, sizeof here);
  describe(&all[other], there, sizeof here);
  struct record resized = all[other];
  resized.sizes = mine->sizes;
  if (memcmp(&resized, mine, sizeof resized) == 0)
    strcat(there, plan_of(call) != NULL                        ? " of other shapes, dtypes or arguments"
                  : attribute_of(call->operation, NUMBER) >= 0 ? " with other counts"
                                                               : " of other sizes");
  if (all[other].call != mine->call) snprintf(at, sizeof at, "is at call %" PRId64 ",", all[other].call);
  exchange_lines(call, other, &lines);
  return call_fail(call, FFI_FAILED_PRECONDITION,
                   "the ranks differ: this is call %" PRId64
                   " on this communicator: %s%s; rank %d %s %s%s. Nothing of it was sent",
                   mine->call, here, lines.here, other, at, there, lines.there);
}

ffi_error *compare_ranks(struct call *call) {
  struct record mine = record_of(call), *all = calloc((size_t)call->comm->size, sizeof *all);
  if (all == NULL) return call_fail(call, FFI_INTERNAL, "no memory to compare what the ranks do");
  call->function = "MPI_Allgather";
  if (call->logged) log_begin(call, "to compare %s, call %" PRId64 ", and", call->operation->name, mine.call);
  int code = runtime.abi->exchange(call->comm, &mine, all, sizeof mine);
  if (call->logged) log_end(call, code != 0);
  ffi_error *error = code != 0 ? call_fail_mpi(call, code) : judge(call, &mine, all);
  free(all);
  return error;
}
