#include "core/plan.h"

#include <complex.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/buffers.h"
#include "core/failure.h"
#include "base/float16.h"

/* --- from numbers to a plan ---
 *
 * In this order: those of PLAN_HEADER; for each array the elements of the operand, then of each result; for each send
 * and receive its rank, offset and bytes; for each box leaf, stage, first, run, two numbers with the bytes of the
 * value, axes, and for each axis its count and stride. */

struct reader {
  const int64_t *next, *end;
};

static int64_t take_number(struct reader *reader) { return reader->next < reader->end ? *reader->next++ : 0; }

static void take_peers(struct reader *reader, struct peer *peers, int count) {
  for (int i = 0; i < count; i++) {
    peers[i].rank = (int)take_number(reader);
    peers[i].stage = take_number(reader);
    peers[i].bytes = take_number(reader);
  }
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
    box->axes = (int)take_number(reader);
    if (box->axes < 0 || box->axes > MAX_BOX_AXES) return false;
    for (int axis = 0; axis < box->axes; axis++) {
      box->counts[axis] = take_number(reader);
      box->strides[axis] = take_number(reader);
    }
  }
  return true;
}

/* The parts of two boxes can be copied one by one. */
static bool are_alike(const struct box *a, const struct box *b) {
  bool alike = a->run == b->run && a->axes == b->axes;
  for (int axis = 0; axis < a->axes && alike; axis++) alike = a->counts[axis] == b->counts[axis];
  return alike;
}

/* Its last packs and unpacks are pairs, and results are not where operands are. */
static bool has_pairs(const struct plan *plan) {
  int count = plan->pair_count;
  if (count == 0) return true;
  bool right = count > 0 && count <= plan->pack_count && count <= plan->unpack_count && !plan->adds &&
               plan->begin != BEGINS_AS_OPERANDS;
  for (int i = 1; i <= count && right; i++)
    right = are_alike(&plan->packs[plan->pack_count - i], &plan->unpacks[plan->unpack_count - i]);
  return right;
}

static bool are_in_order(const struct box *boxes, int count) {
  for (int i = 1; i < count; i++)
    if (boxes[i].stage < boxes[i - 1].stage) return false;
  return true;
}

struct plan *plan_make(const int64_t *numbers, size_t count) {
  struct reader reader = {numbers, numbers + count};
  struct plan *plan = calloc(1, sizeof *plan);
  if (plan == NULL) return NULL;
#define SET(name) plan->name = (__typeof__(plan->name))take_number(&reader);
  PLAN_HEADER(SET)
#undef SET
  size_t peers = (size_t)plan->send_count + (size_t)plan->receive_count;
  size_t boxes = (size_t)plan->pack_count + (size_t)plan->fill_count + (size_t)plan->unpack_count;
  size_t arrays = 2 * (size_t)plan->arrays;
  int64_t *elements = calloc(arrays + 1, sizeof *elements);
  plan->elements = elements;
  plan->sends = calloc(peers + 1, sizeof *plan->sends);
  plan->packs = calloc(boxes + 1, sizeof *plan->packs);
  bool whole = elements != NULL && plan->sends != NULL && plan->packs != NULL;
  if (whole) {
    plan->receives = plan->sends + plan->send_count;
    plan->fills = plan->packs + plan->pack_count;
    plan->unpacks = plan->fills + plan->fill_count;
    for (size_t i = 0; i < arrays; i++) elements[i] = take_number(&reader);
    take_peers(&reader, plan->sends, (int)peers);
    whole = take_boxes(&reader, plan->packs, (int)boxes) && reader.next == reader.end && has_pairs(plan) &&
            are_in_order(plan->packs, plan->pack_count - plan->pair_count) &&
            (plan->adds || are_in_order(plan->unpacks, plan->unpack_count - plan->pair_count));
  }
  if (whole) return plan;
  free(elements);
  free(plan->sends);
  free(plan->packs);
  free(plan);
  return NULL;
}

const struct plan *plan_of(const struct call *call) {
  int i = attribute_of(call->operation, KIND_PLAN);
  return i >= 0 ? object_of(call->attributes[i]) : NULL;
}

/* --- boxes --- */

/* What is done with a row of a box's parts: in the array they begin `stride` bytes apart, in the message they follow
 * each other. */
typedef void row_function(const struct box *box, char *array, int64_t stride, int64_t count, char *message);

static void walk_axis(row_function *function, const struct box *box, int axis, char *array, char **message) {
  if (axis + 1 >= box->axes) {
    int64_t count = box->axes > 0 ? box->counts[axis] : 1, stride = box->axes > 0 ? box->strides[axis] : 0;
    function(box, array, stride, count, *message);
    if (*message != NULL) *message += count * box->run;
    return;
  }
  for (int64_t i = 0; i < box->counts[axis]; i++)
    walk_axis(function, box, axis + 1, array + i * box->strides[axis], message);
}

static void walk_box(row_function *function, const struct box *box, void *array, const char *message) {
  char *at = (char *)(uintptr_t)message;
  walk_axis(function, box, 0, (char *)array + box->first, &at);
}

/* Copies of a size that is known to the compiler are a few instructions. */
#define WITH_RUN(run, COPY) \
  switch (run) {            \
    case 4:                 \
      COPY(4)               \
    case 8:                 \
      COPY(8)               \
    case 16:                \
      COPY(16)              \
    case 32:                \
      COPY(32)              \
    case 64:                \
      COPY(64)              \
    default:                \
      COPY(run)             \
  }

/* Copies `count` runs, which begin `stride` bytes apart, to where they begin `apart` bytes apart. */
static inline void copy_runs(char *written, int64_t apart, const char *read, int64_t stride, int64_t count,
                             int64_t run) {
#define COPY(size)                                                                                    \
  for (int64_t i = 0; i < count; i++) memcpy(written + i * apart, read + i * stride, (size_t)(size)); \
  break;
  WITH_RUN(run, COPY)
#undef COPY
}

static void gather_row(const struct box *box, char *array, int64_t stride, int64_t count, char *message) {
  copy_runs(message, box->run, array, stride, count, box->run);
}

static void scatter_row(const struct box *box, char *array, int64_t stride, int64_t count, char *message) {
  copy_runs(array, stride, message, box->run, count, box->run);
}

/* Without a message. */
static void fill_row(const struct box *box, char *array, int64_t stride, int64_t count, char *message) {
  const int64_t width = sizeof box->value, run = box->run;
  (void)message;
  for (int64_t i = 0; i < count; i++) {
    int64_t k = 0;
    for (; k + width <= run; k += width) memcpy(array + i * stride + k, box->value, sizeof box->value);
    memcpy(array + i * stride + k, box->value, (size_t)(run - k));
  }
}

/* Adds what is in the message, in the arithmetic of one type. Neither need be aligned. */
#define SUM(type, x, y)      (type)((x) + (y))
#define SUM_F16(type, x, y)  float16_from_float(float16_to_float(x) + float16_to_float(y))
#define SUM_BF16(type, x, y) bfloat16_from_float(bfloat16_to_float(x) + bfloat16_to_float(y))
#define ADDER(name, type, SUM_OF)                                                                      \
  static void name(const struct box *box, char *array, int64_t stride, int64_t count, char *message) { \
    const int64_t run = box->run;                                                                      \
    for (int64_t i = 0; i < count; i++)                                                                \
      for (int64_t k = 0; k < run; k += (int64_t)sizeof(type)) {                                       \
        type x, y;                                                                                     \
        memcpy(&x, array + i * stride + k, sizeof x);                                                  \
        memcpy(&y, message + i * run + k, sizeof y);                                                   \
        x = SUM_OF(type, x, y);                                                                        \
        memcpy(array + i * stride + k, &x, sizeof x);                                                  \
      }                                                                                                \
  }
typedef float _Complex complex64;
typedef double _Complex complex128;
ADDER(add_float32, float, SUM)
ADDER(add_float64, double, SUM)
ADDER(add_complex64, complex64, SUM)
ADDER(add_complex128, complex128, SUM)
ADDER(add_float16, uint16_t, SUM_F16)
ADDER(add_bfloat16, uint16_t, SUM_BF16)

/* NULL: of this type nothing is added. */
static row_function *adder_of(const struct datatype *type) {
  switch (type->code) {
    case FFI_DTYPE_F16:
      return add_float16;
    case FFI_DTYPE_BF16:
      return add_bfloat16;
    case FFI_DTYPE_F32:
      return add_float32;
    case FFI_DTYPE_F64:
      return add_float64;
    case FFI_DTYPE_C64:
      return add_complex64;
    case FFI_DTYPE_C128:
      return add_complex128;
    default:
      return NULL;
  }
}

/* Copies the parts of a box to those of another one, which is like it. */
static void copy_axes(const struct box *from, const struct box *to, int axis, const char *read, char *written) {
  if (axis < from->axes - 1) {
    for (int64_t i = 0; i < from->counts[axis]; i++)
      copy_axes(from, to, axis + 1, read + i * from->strides[axis], written + i * to->strides[axis]);
    return;
  }
  const bool row = axis < from->axes;
  copy_runs(written, row ? to->strides[axis] : 0, read, row ? from->strides[axis] : 0, row ? from->counts[axis] : 1,
            from->run);
}

/* --- a call --- */

ffi_error *plan_check(const struct call *call, const struct plan *plan) {
  bool same = call->first[1] - call->first[0] == plan->arrays && call->first[2] - call->first[1] == plan->arrays;
  for (int i = 0; i < plan->arrays && same; i++) {
    const struct buffer *in = plan_operand(call, i), *out = plan_result(call, i);
    same = in->count == plan->elements[i] && out->count == plan->elements[plan->arrays + i] && in->type == out->type &&
           (!plan->adds || adder_of(in->type) != NULL);
  }
  return same ? NULL : call_fail(call, FFI_INTERNAL, "the arrays are not those of its plan: reinstall jaxmpi");
}

ffi_error *plan_check_operands(const struct call *call, const struct plan *plan) {
  bool same = call->first[1] - call->first[0] == plan->arrays;
  for (int i = 0; i < plan->arrays && same; i++) same = plan_operand(call, i)->count == plan->elements[i];
  return same ? NULL : call_fail(call, FFI_INTERNAL, "the arrays are not those of its plan: reinstall jaxmpi");
}

ffi_error *plan_begin(const struct call *call, const struct plan *plan) {
  ffi_error *error = NULL;
  if (plan->begin == BEGINS_COVERED) return NULL;
  for (int i = 0; i < plan->arrays && error == NULL; i++) {
    const struct buffer *in = plan_operand(call, i), *out = plan_result(call, i);
    if (out->count == 0 || (in->data == out->data && plan->begin == BEGINS_AS_OPERANDS)) continue;
    if (plan->begin == BEGINS_AS_ZERO)
      error = call_zero(call, out->data, buffer_bytes(out));
    else
      error = call_move(call, out->data, in->data, buffer_bytes(out));
  }
  return error;
}

uint64_t plan_label(const struct call *call, const struct plan *plan, uint64_t number) {
  uint64_t hash = plan->signature + number * UINT64_C(0x9e3779b97f4a7c15);
  hash ^= (uint64_t)call->attributes[attribute_of(call->operation, KIND_DERIVATIVE)] * UINT64_C(0xd1342543de82ef95);
  hash = (hash ^ hash >> 30) * UINT64_C(0xbf58476d1ce4e5b9); /* the finalizer of splitmix64 */
  hash = (hash ^ hash >> 27) * UINT64_C(0x94d049bb133111eb);
  return hash ^ hash >> 31;
}

static void gather(const struct call *call, const struct box *box, char *stage) {
  walk_box(gather_row, box, plan_operand(call, box->leaf)->data, stage + box->stage);
}

int plan_compose_until(const struct call *call, const struct plan *plan, char *stage, int next, int64_t end) {
  for (; next < plan->pack_count - plan->pair_count && plan->packs[next].stage < end; next++)
    gather(call, &plan->packs[next], stage);
  return next;
}

void plan_compose(const struct call *call, const struct plan *plan, char *stage) {
  for (int i = 0; i < plan->pack_count; i++) gather(call, &plan->packs[i], stage);
}

void plan_fill(const struct call *call, const struct plan *plan) {
  plan_begin(call, plan); /* on the host it cannot fail */
  for (int i = 0; i < plan->fill_count; i++)
    walk_box(fill_row, &plan->fills[i], plan_result(call, plan->fills[i].leaf)->data, NULL);
}

void plan_copy_pairs(const struct call *call, const struct plan *plan) {
  const struct box *from = plan->packs + plan->pack_count - plan->pair_count;
  const struct box *to = plan->unpacks + plan->unpack_count - plan->pair_count;
  for (const struct box *end = from + plan->pair_count; from < end; from++, to++)
    copy_axes(from, to, 0, (const char *)plan_operand(call, from->leaf)->data + from->first,
              (char *)plan_result(call, to->leaf)->data + to->first);
}

static void scatter(const struct call *call, const struct box *box, bool adds, const char *stage) {
  const struct buffer *array = plan_result(call, box->leaf);
  walk_box(adds ? adder_of(array->type) : scatter_row, box, array->data, stage + box->stage);
}

int plan_unpack_until(const struct call *call, const struct plan *plan, const char *stage, int next, int64_t end) {
  for (; next < plan->unpack_count - plan->pair_count && plan->unpacks[next].stage < end; next++)
    scatter(call, &plan->unpacks[next], false, stage);
  return next;
}

void plan_unpack(const struct call *call, const struct plan *plan, const char *stage) {
  for (int i = 0; i < plan->unpack_count; i++) scatter(call, &plan->unpacks[i], plan->adds, stage);
}

void plan_spoil(const struct call *call, const struct plan *plan) {
  for (int i = 0; i < plan->arrays && plan->begin != BEGINS_AS_OPERANDS; i++) {
    const struct buffer *out = plan_result(call, i);
    if (out->count > 0) memset(out->data, 0xff, buffer_bytes(out));
  }
}

/* --- boxes without gaps --- */

int64_t box_bytes(const struct box *box) {
  int64_t bytes = box->run;
  for (int axis = 0; axis < box->axes; axis++) bytes *= box->counts[axis];
  return bytes;
}

static struct box without_gaps(const struct box *box) {
  struct box whole = {.run = box_bytes(box)};
  memcpy(whole.value, box->value, sizeof whole.value);
  return whole;
}

void box_fill(const struct box *box, char *whole) {
  struct box all = without_gaps(box);
  fill_row(&all, whole, 0, 1, NULL);
}

void box_add(const struct box *box, const struct datatype *type, char *whole, const char *message) {
  struct box all = without_gaps(box);
  adder_of(type)(&all, whole, 0, 1, (char *)(uintptr_t)message);
}
