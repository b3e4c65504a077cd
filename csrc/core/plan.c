#include "core/plan.h"

#include <stdlib.h>
#include <string.h>

#include "core/failure.h"
#include "core/registry.h"

/* --- from numbers to a plan ---
 *
 * First come the numbers of PLAN_HEADER. Then come, for each array, the elements of the operand, then of each result.
 * Each send and each receive has the rank, offset and bytes. Each box has leaf, stage, first, run, two numbers with the
 * bytes of the value, the number of the list or 0, axes, and for each axis count and stride. */

struct reader {
  const int64_t *next, *end;
};

static int64_t take_number(struct reader *reader) { return reader->next < reader->end ? *reader->next++ : 0; }

/* Read peers whose messages lie one behind the other in `bytes` of the stage. False: they do not, or a message is not
 * longer than a label. */
static bool take_peers(struct reader *reader, struct peer *peers, int count, int *announced, int64_t from,
                       int64_t bytes) {
  bool valid = true;
  int64_t end = from;
  for (int i = 0; i < count; i++) {
    peers[i].rank = (int)take_number(reader);
    peers[i].stage = take_number(reader);
    peers[i].bytes = take_number(reader);
    *announced += is_announced(&peers[i]);
    valid &= peers[i].bytes > LABEL_BYTES && peers[i].stage >= end;
    end = peers[i].stage + peers[i].bytes;
  }
  return valid && end <= from + bytes;
}

static bool take_boxes(struct reader *reader, struct box *boxes, int count) {
  for (int i = 0; i < count; i++) {
    struct box *box = &boxes[i];
    box->leaf = (int)take_number(reader);
    box->stage = take_number(reader);
    box->first = take_number(reader);
    box->run = take_number(reader);
    int64_t value[2] = {take_number(reader), take_number(reader)};
    memcpy(box->value, value, sizeof value);
    int64_t list = take_number(reader);
    box->axes = (int)take_number(reader);
    if (box->axes < 0 || box->axes > MAX_BOX_AXES) return false;
    for (int axis = 0; axis < box->axes; axis++) {
      box->counts[axis] = take_number(reader);
      box->strides[axis] = take_number(reader);
    }
    if (list == 0) continue;
    box->list = registry_at(list);
    if (box->list == NULL || box->axes == 0 || box->list->count != box->counts[box->axes - 1]) return false;
  }
  return true;
}

/* Return whether the last packs and unpacks of a plan are pairs, and results are not where operands are. */
static bool has_pairs(const struct plan *plan) {
  int count = plan->pair_count;
  if (count == 0) return true;
  bool valid = count > 0 && count <= plan->pack_count && count <= plan->unpack_count && !plan->combines &&
               plan->begin != BEGINS_AS_OPERANDS;
  for (int i = 1; i <= count && valid; i++)
    valid = box_is_like(&plan->packs[plan->pack_count - i], &plan->unpacks[plan->unpack_count - i]);
  return valid;
}

static bool are_in_order(const struct box *boxes, int count) {
  for (int i = 1; i < count; i++)
    if (boxes[i].stage < boxes[i - 1].stage) return false;
  return true;
}

static void find_streams(struct plan *plan) {
  int next = 0;
  for (int i = 0; i < plan->send_count; i++)
    for (struct peer *peer = &plan->sends[i];
         next < plan->pack_count && plan->packs[next].stage < peer->stage + peer->bytes; next++)
      peer->streams |= plan->packs[next].streams = box_streams(&plan->packs[next], peer->bytes);
}

/* The number of operands of a call, and the number of results. */
static int buffers_of(const struct plan *plan) { return is_of_messages(plan) ? 1 : plan->arrays; }

struct plan *plan_make(const int64_t *numbers, size_t count) {
  struct reader reader = {numbers, numbers + count};
  struct plan *plan = calloc(1, sizeof *plan);
  if (plan == NULL) return NULL;
#define SET(name) plan->name = (__typeof__(plan->name))take_number(&reader);
  PLAN_HEADER(SET)
#undef SET
  size_t peers = (size_t)plan->send_count + (size_t)plan->receive_count;
  size_t boxes = (size_t)plan->pack_count + (size_t)plan->fill_count + (size_t)plan->unpack_count;
  size_t arrays = 2 * (size_t)buffers_of(plan);
  int64_t *elements = calloc(arrays + 1, sizeof *elements);
  plan->elements = elements;
  plan->sends = calloc(peers + 1, sizeof *plan->sends);
  plan->trials = calloc((size_t)plan->send_count + 1, sizeof *plan->trials);
  plan->packs = calloc(boxes + 1, sizeof *plan->packs);
  bool whole = elements != NULL && plan->sends != NULL && plan->trials != NULL && plan->packs != NULL;
  if (whole) {
    plan->receives = plan->sends + plan->send_count;
    plan->fills = plan->packs + plan->pack_count;
    plan->unpacks = plan->fills + plan->fill_count;
    for (size_t i = 0; i < arrays; i++) elements[i] = take_number(&reader);
    bool valid = take_peers(&reader, plan->sends, plan->send_count, &plan->announced_sends, 0, plan->sent);
    valid &=
        take_peers(&reader, plan->receives, plan->receive_count, &plan->announced_receives, plan->sent, plan->received);
    whole = valid && take_boxes(&reader, plan->packs, (int)boxes) && reader.next == reader.end && has_pairs(plan) &&
            plan->combines < COMBINATIONS && (boxes == 0 || !is_of_messages(plan)) &&
            are_in_order(plan->packs, plan->pack_count - plan->pair_count) &&
            (plan->combines || are_in_order(plan->unpacks, plan->unpack_count - plan->pair_count));
  }
  if (whole) {
    find_streams(plan);
    return plan;
  }
  free(elements);
  free(plan->sends);
  free(plan->trials);
  free(plan->packs);
  free(plan);
  return NULL;
}

const struct plan *plan_of(const struct call *call) {
  int i = attribute_of(call->operation, KIND_PLAN);
  return i >= 0 ? object_of(call->attributes[i]) : NULL;
}

/* --- a call --- */

ffi_error *plan_check(const struct call *call, const struct plan *plan, bool operands, bool results) {
  int count = buffers_of(plan);
  bool same =
      (!operands || call->first[1] - call->first[0] == count) && (!results || call->first[2] - call->first[1] == count);
  for (int i = 0; i < count && same; i++) {
    const struct buffer *in = plan_operand(call, i), *out = plan_result(call, i);
    same = (!operands || in->count == plan->elements[i]) &&
           (!results || (out->count == plan->elements[count + i] && (!operands || in->type == out->type) &&
                         (!plan->combines || box_combines(plan->combines, out->type))));
  }
  return same ? NULL : call_fail(call, FFI_INTERNAL, "the arrays do not fit the plan: reinstall jaxmpi");
}

uint64_t plan_label(const struct call *call, const struct plan *plan, uint64_t number) {
  uint64_t hash = plan->signature + number * UINT64_C(0x9e3779b97f4a7c15);
  hash ^= (uint64_t)call->attributes[attribute_of(call->operation, KIND_DERIVATIVE)] * UINT64_C(0xd1342543de82ef95);
  hash = (hash ^ hash >> 30) * UINT64_C(0xbf58476d1ce4e5b9); /* the finalizer of splitmix64 */
  hash = (hash ^ hash >> 27) * UINT64_C(0x94d049bb133111eb);
  return hash ^ hash >> 31;
}

static void gather(const struct call *call, const struct box *box, char *stage, bool streams) {
  box_gather(box, plan_operand(call, box->leaf)->data, stage + box->stage, streams);
}

/* Gather the packs from `next` on that lie before `end` in the stage, without the pairs. Return the next pack. */
static int gather_until(const struct call *call, const struct plan *plan, char *stage, bool streams, int next,
                        int64_t end) {
  for (; next < plan->pack_count - plan->pair_count && plan->packs[next].stage < end; next++)
    gather(call, &plan->packs[next], stage, streams);
  return next;
}

int plan_compose_message(const struct call *call, const struct plan *plan, char *stage, int send, int next) {
  const struct peer *peer = &plan->sends[send];
  int64_t end = peer->stage + peer->bytes;
  if (!peer->streams) return gather_until(call, plan, stage, false, next, end);
  struct trial *trial = &plan->trials[send];
  uint32_t number = trial_begin(trial);
  bool timed = trial_is_timed(number);
  double begin = timed ? seconds_now() : 0;
  next = gather_until(call, plan, stage, trial_way(trial, number), next, end);
  if (timed) trial_end(trial, number, seconds_now() - begin);
  return next;
}

void plan_compose_rest(const struct call *call, const struct plan *plan, char *stage, int next, bool pairs) {
  next = gather_until(call, plan, stage, false, next, INT64_MAX);
  for (; pairs && next < plan->pack_count; next++) gather(call, &plan->packs[next], stage, false);
}

static void begin_results(const struct call *call, const struct plan *plan) {
  if (plan->begin != BEGINS_AS_OPERANDS && plan->begin != BEGINS_AS_ZERO) return;
  for (int i = 0; i < plan->arrays; i++) {
    const struct buffer *in = plan_operand(call, i), *out = plan_result(call, i);
    if (out->count == 0) continue;
    if (plan->begin == BEGINS_AS_ZERO)
      memset(out->data, 0, buffer_bytes(out));
    else if (in->data != out->data)
      memcpy(out->data, in->data, buffer_bytes(out));
  }
}

void plan_fill(const struct call *call, const struct plan *plan) {
  begin_results(call, plan);
  for (int i = 0; i < plan->fill_count; i++) box_fill(&plan->fills[i], plan_result(call, plan->fills[i].leaf)->data);
}

void plan_copy_pairs(const struct call *call, const struct plan *plan) {
  const struct box *from = plan->packs + plan->pack_count - plan->pair_count;
  const struct box *to = plan->unpacks + plan->unpack_count - plan->pair_count;
  for (const struct box *end = from + plan->pair_count; from < end; from++, to++)
    box_copy(from, plan_operand(call, from->leaf)->data, to, plan_result(call, to->leaf)->data);
}

static void scatter(const struct call *call, const struct box *box, enum combination how, const char *stage) {
  const struct buffer *array = plan_result(call, box->leaf);
  if (how == COMBINE_NOT)
    box_scatter(box, array->data, stage + box->stage);
  else
    box_combine(box, how, array->type, array->data, stage + box->stage);
}

int plan_unpack_until(const struct call *call, const struct plan *plan, const char *stage, int next, int64_t end) {
  for (; next < plan->unpack_count - plan->pair_count && plan->unpacks[next].stage < end; next++)
    scatter(call, &plan->unpacks[next], COMBINE_NOT, stage);
  return next;
}

void plan_unpack(const struct call *call, const struct plan *plan, const char *stage) {
  if (is_of_messages(plan)) {
    const struct buffer *out = plan_result(call, 0);
    if (out->count > 0) memcpy(out->data, stage + plan->sent + plan->received - buffer_bytes(out), buffer_bytes(out));
  }
  for (int i = 0; i < plan->unpack_count; i++) scatter(call, &plan->unpacks[i], plan->combines, stage);
}

void plan_spoil(const struct call *call, const struct plan *plan) {
  for (int i = 0; i < buffers_of(plan) && plan->begin != BEGINS_AS_OPERANDS; i++) {
    const struct buffer *out = plan_result(call, i);
    if (out->count > 0) memset(out->data, 0xff, buffer_bytes(out));
  }
}
