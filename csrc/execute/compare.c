#include "execute/compare.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/text.h"
#include "core/failure.h"
#include "core/plan.h"
#include "execute/agreement.h"
#include "observe/log.h"
#include "observe/summary.h"
#include "requests/table.h"

/* Set the elements and the type of this rank's share: of the buffers, read or written, that have the same size on all
 * ranks. */
static void find_share(struct call *call) {
  call->comparison.share = 0, call->comparison.type = NULL, call->comparison.written = false;
  if (plan_of(call) != NULL) return; /* of arrays with other sizes on other ranks */
  int row = attribute_of(call->operation, KIND_NUMBER);
  int64_t counts[2] = {0, 0};
  const struct datatype *types[2] = {NULL, NULL};
  for (int i = 0; i < call->buffer_count; i++) {
    const struct buffer *buffer = &call->buffers[i];
    if (buffer->type == NULL || role_is_of_host(buffer->role)) continue;
    bool written = role_is_written(buffer->role);
    counts[written] += buffer->count;
    if (types[written] == NULL) types[written] = buffer->type;
  }
  bool written = call->operation->divisibility == DIVIDE_SCATTERS || types[0] == NULL;
  call->comparison.type = types[written];
  call->comparison.share = row >= 0 ? call->attributes[row] : counts[written]; /* of arrays divided by rows, a row */
  call->comparison.written = written;
  const struct datatype *type = array_not_passed(call->operation, call->attributes, &call->comparison.share);
  if (type != NULL) call->comparison.type = type;
}

static inline bool all_are_compared(void) { return atomic_load_explicit(&runtime.check, memory_order_relaxed); }

void compare_decide(struct call *call) {
  bool collective = attribute_of(call->operation, KIND_DERIVATIVE) >= 0; /* all collectives have it */
  bool all = all_are_compared();
  bool labelled = plan_of(call) != NULL && !comm_is_by_nccl(call->comm);
  call->comparison.due = call->comm->size > 1 && collective && (all || !labelled);
  call->labelled = !collective && call->memory->host && has_labels();
  if (call->comparison.due || call->labelled) find_share(call);
}

/* Record the number of arrays of a joined call, and a hash of the sizes of their shares. */
static void record_arrays(const struct call *call, struct record *record) {
  for (int i = 0; i < call->buffer_count; i++) {
    int count;
    const struct buffer *leaf = leaves_of(call, i, &count);
    if (role_is_written(call->buffers[i].role) != call->comparison.written) continue;
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
    if (call->buffers[i].role != ROLE_HOST_READ) continue;
    if (counts != NULL) return 0; /* sent and received counts differ from rank to rank */
    counts = &call->buffers[i];
  }
  uint64_t hash = HASH_START;
  for (size_t i = 0; counts != NULL && i < buffer_bytes(counts); i++)
    hash = hash_add(hash, ((const unsigned char *)counts->data)[i]);
  return (int64_t)hash;
}

/* The number of a call's operation or function in a record. A start of an exchange has the number of the exchange in
 * one call, because these match, unless NCCL carries the latter. */
static int64_t operation_number(const struct call *call) {
  int function = function_of(call->operation, call->attributes);
  bool match = !comm_is_by_nccl(call->comm);
  if (function != FUNCTION_OF_ROW) return OPERATION_COUNT + (match ? function_table[function].compared : function);
  return match && call->operation->row == ROW_exchange_start ? ROW_exchange : call->operation->row;
}

/* The operation of a record; NULL: this version of the package has none with this number. `name`: for users. */
static const struct operation *operation_of(const struct record *record, const char **name) {
  int64_t number = record->operation;
  if (number < 0 || number == OPERATION_COUNT || number >= OPERATION_COUNT + FUNCTION_COUNT) return NULL;
  bool of_function = number > OPERATION_COUNT;
  const struct operation *row = &operation_table[of_function ? function_table[number - OPERATION_COUNT].row : number];
  *name = of_function ? function_table[number - OPERATION_COUNT].name : row->name;
  return row;
}

static struct record record_of(struct call *call) {
  const struct operation *operation = call->operation;
  const struct datatype *type = call->comparison.type;
  struct record record = {.call = (int64_t)atomic_fetch_add(&call->comm->compared, 1) + 1,
                          .operation = operation_number(call),
                          .derivative = call->attributes[attribute_of(operation, KIND_DERIVATIVE)],
                          .root = -1,
                          .dtype = type != NULL ? type->code : -1,
                          .count = call->comparison.share};
  if (call->leaves != NULL) record_arrays(call, &record);
  if (plan_of(call) != NULL) {
    record.arrays = plan_of(call)->arrays;
    record.sizes = (int64_t)plan_of(call)->signature;
  }
  if (attribute_of(operation, KIND_NUMBER) >= 0) record.sizes = hash_of_counts(call);
  for (int i = 0; i < operation->attribute_count; i++) {
    if (operation->attributes[i].kind == KIND_RANK) record.root = call->attributes[i];
    if (operation->attributes[i].kind != KIND_REDUCTION) continue;
    const struct reduction *reduction = object_of(call->attributes[i]);
    record.reduction = reduction->by == REDUCER_USER ? USERS_REDUCTION : reduction->number;
  }
  return record;
}

/* Add a record in words. It may come from a rank with another version of the package, so the values are checked. */
static void describe_record(const struct record *record, struct text *text) {
  const struct datatype *type = datatype_find((int)record->dtype);
  const struct reduction *reduction = registry_at(record->reduction);
  const char *name = "an unknown operation";
  const struct operation *row = operation_of(record, &name);
  text_add(text, "%s", name);
  if (row == NULL) return;
  if (record->reduction == USERS_REDUCTION) text_add(text, " by a reduction of the user's");
  if (reduction != NULL)
    text_add(text, " %.*s", (int)strcspn(reduction->name, " "), reduction->name); /* "SUM of float16" */
  if (record->root >= 0)
    text_add(text, " %s root %" PRId64,
             row->divisibility == DIVIDE_GATHERS || row->row == ROW_gatherv || record->reduction != 0 ? "to" : "from",
             record->root);
  bool rows = attribute_of(row, KIND_NUMBER) >= 0;
  if (type != NULL) text_add(text, " of %s%" PRId64 " %s", rows ? "rows of " : "", record->count, type->name);
  if (record->arrays > 0) text_add(text, " in %" PRId64 " array%s", record->arrays, record->arrays > 1 ? "s" : "");
  if ((type != NULL || record->arrays > 0) && derivative_name(record->derivative) != NULL)
    text_add(text, " (%s)", derivative_name(record->derivative));
}

/* The lines of the program that make calls like this. */
static void find_lines(const struct call *call, char *lines, size_t size) {
  struct text text = text_in(lines, size);
  int64_t summary[SUMMARY_WORDS] = {0};
  summarize(call, summary);
  summary_add_call_sites(&text, "called at ", summary);
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

enum { LINES = 512 };

/* A rank's report of a call that differs from the call on other ranks. */
struct report {
  struct record record;
  char lines[LINES]; /* of the program, with "called at " in front; empty: not known */
};

/* The members of a record that ranks compare. MPI does not distinguish a derivative from its function, so they differ
 * only if all calls are compared. */
static struct record compared_of(const struct record *record) {
  struct record compared = *record;
  if (!all_are_compared()) compared.derivative = 0;
  return compared;
}

static bool are_same(const struct record *a, const struct record *b) {
  struct record ours = compared_of(a), others = compared_of(b);
  return memcmp(&ours, &others, sizeof ours) == 0;
}

/* A hash of a record and of everything compared before. */
static int64_t hash_of(const struct record *record, int64_t history) {
  struct record compared = compared_of(record);
  int64_t words[sizeof compared / sizeof(int64_t)];
  _Static_assert(sizeof words == QUESTION_BYTES, "a question is about a record");
  memcpy(words, &compared, sizeof words);
  uint64_t hash = hash_add(HASH_START, history);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = hash_add(hash, words[i]);
  return (int64_t)hash;
}

/* Advice for the commonest mistake with a scatter. */
static const char *advice_on_scatter(const struct communicator *comm, const struct record *mine,
                                     const struct record *other) {
  int64_t parts = comm->size;
  bool whole = mine->operation == ROW_scatter && other->operation == ROW_scatter && mine->root == other->root &&
               (mine->count == other->count * parts || other->count == mine->count * parts);
  return whole ? ". Root alone passes the whole array, the others a template of one part, such as x[0]" : "";
}

/* Seconds that a rank waits for the others before a collective; after it has waited in vain once; and, for a started
 * operation, in the wait for it. */
double compare_patience = 10;
enum { LESS_PATIENCE = 1 };

/* Advice for a communicator that the program has made: another library may use it, too. */
static const char *advice_on_others(const struct communicator *comm) {
  return agreement_is_of_default(comm) || all_are_compared()
             ? ""
             : ". Where ranks call it by another library, as mpi4py: JAXMPI_CHECK=0";
}

/* The error of a rank that knows what `rank` does in place of this call. `now`: `call` itself differs. */
static ffi_error *fail_differing(const struct call *call, struct communicator *comm, const struct report *mine,
                                 const struct report *other, int rank, bool now) {
  const char *name;
  const struct operation *row = operation_of(&mine->record, &name);
  char here[256], there[256 + 48], at[64] = "calls";
  struct text of_this = text_in(here, sizeof here), of_other = text_in(there, sizeof there);
  describe_record(&mine->record, &of_this);
  describe_record(&other->record, &of_other);
  struct record resized = other->record;
  resized.sizes = mine->record.sizes;
  if (are_same(&resized, &mine->record))
    text_add(&of_other, "%s",
             attribute_of(row, KIND_PLAN) >= 0     ? " of other shapes, dtypes or arguments, or not mapped by the same "
                                                     "jax.vmap"
             : attribute_of(row, KIND_NUMBER) >= 0 ? " with other counts"
                                                   : " of other sizes");
  if (other->record.call != mine->record.call) snprintf(at, sizeof at, "is at call %" PRId64 ",", other->record.call);
  resized.count = mine->record.count;
  const char *mapped = are_same(&resized, &mine->record) ? advice_on_vmap(mine->record.count, other->record.count) : "";
  const char *whole = advice_on_scatter(comm, &mine->record, &other->record);
  bool known_lines = strncmp(other->lines, "called at ", 10) == 0; /* another version may report something else */
  return call_fail(call, FFI_FAILED_PRECONDITION,
                   "the ranks differ: %s call %" PRId64 " on this communicator: %s%s%s; rank %d %s %s%s%.*s%s%s%s",
                   now ? "this is" : "before this,", mine->record.call, here, mine->lines[0] != '\0' ? " " : "",
                   mine->lines, rank, at, there, known_lines ? " " : "", known_lines ? LINES - 1 : 0, other->lines,
                   now ? ". Nothing of it was sent" : "", whole[0] != '\0' ? whole : mapped, advice_on_others(comm));
}

/* The error of a rank that knows only that a call differs, but not how. */
static ffi_error *fail_unknown(const struct call *call, const struct record *mine) {
  char here[256];
  struct text text = text_in(here, sizeof here);
  describe_record(mine, &text);
  return call_fail(call, FFI_FAILED_PRECONDITION,
                   "the ranks differ: call %" PRId64
                   " on this communicator is here %s, and it or one before it is "
                   "another one on another rank",
                   mine->call, here);
}

/* Return whether another rank has reported on the same question. A report may be on an earlier question, from a rank
 * that has waited here in vain, or from another version. */
static bool has_reported(const struct report *all, const bool *came, int rank, const struct record *mine) {
  return came[rank] && (all_are_compared() || all[rank].record.call == mine->call);
}

/* The error after the ranks have asked about `mine` and know that they differ. By default NULL unless all of them are
 * here, or NCCL carries calls. A rank that has gone on without an answer has waited for ranks that take part by another
 * library, or that were late; then this rank asks nothing any more. `now`: `call` itself differs, and not an earlier
 * one. */
static ffi_error *judge_difference(const struct call *call, struct communicator *comm, const struct record *mine,
                                   bool now) {
  int size = comm->size, other = size, missing = 0;
  struct report *own = calloc(1, sizeof *own), *all = calloc((size_t)size, sizeof *all);
  bool *came = calloc((size_t)size, sizeof *came), over = true, heard = own != NULL && all != NULL && came != NULL;
  ffi_error *error = NULL;
  comm->history = mine->call; /* from here on the same on all ranks again */
  if (heard) {
    own->record = *mine;
    if (now) find_lines(call, own->lines, sizeof own->lines);
    over = agreement_gather(comm, own, all, came, sizeof *own, all_are_compared() ? -1 : compare_patience / 2);
    for (int rank = size - 1; rank >= 0; rank--)
      if (!has_reported(all, came, rank, mine))
        missing++;
      else if (!are_same(&all[rank].record, mine))
        other = rank;
  }
  bool by_nccl = comm_is_by_nccl(comm); /* then all ranks use this library */
  if (heard && missing > 0 && !all_are_compared() && !by_nccl)
    agreement_leave(comm, true);
  else
    error = other < size ? fail_differing(call, comm, own, &all[other], other, now) : fail_unknown(call, mine);
  if (over) free(own);
  free(all), free(came);
  return error;
}

/* Calls in a row with a wait in vain before a communicator compares no more. */
enum { IN_VAIN = 3 };

static double patience_of(const struct call *call) {
  if (all_are_compared()) return -1;
  if (has_request(call->operation)) return 0;
  return call->comm->in_vain == 0 ? compare_patience : LESS_PATIENCE;
}

ffi_error *compare_ranks(struct call *call) {
  bool all = all_are_compared(), starts = has_request(call->operation);
  struct communicator *comm = call->comm;
  struct record mine = record_of(call), heard;
  comm->history = hash_of(&mine, comm->history);
  call->function = "MPI_Isend";
  int code = agreement_ask(comm, comm->history, &mine);
  if (code != 0) {
    atomic_store(&comm->to_compare, 0);
    return all && code != NOT_ASKED ? call_fail_mpi(call, code) : NULL;
  }
  if (!all) atomic_fetch_sub(&comm->to_compare, 1);
  if (all && call->log.on) log_begin(call, "to compare %s, call %" PRId64 ", and", call_name(call), mine.call);
  enum answer answer = agreement_hear(comm, patience_of(call), &heard);
  if (all && call->log.on) log_end(call, false);
  if (answer == ANSWER_NONE && !starts) agreement_leave(comm, ++comm->in_vain >= IN_VAIN);
  if (answer == ANSWER_SAME) comm->in_vain = 0;
  if (answer != ANSWER_DIFFERENT) return NULL;
  return judge_difference(call, comm, &heard, heard.call == mine.call && !starts);
}

ffi_error *compare_started(const struct call *call, struct communicator *comm, bool waits) {
  struct record heard;
  if (all_are_compared() || agreement_hear(comm, waits ? LESS_PATIENCE : 0, &heard) != ANSWER_DIFFERENT) return NULL;
  return judge_difference(call, comm, &heard, false);
}
