#include "devices/boxes.h"

#include <stdlib.h>

#include "core/failure.h"

/* --- a box as rows --- */

/* How many parts from part `i` of the list on are contiguous in the array: they are one copy. */
static int64_t parts_together(const struct box *box, int64_t i) {
  return box->strides[box->axes - 1] == box->run ? indices_run(box->list, i) : 1;
}

/* The rows along one axis of a box, by which it is copied: the axis with the most rows that the driver copies at once.
 * The axis is -1 for a box that is one run, or whose runs it copies one by one. */
static struct rows rows_of(const struct box *box, int *along) {
  struct rows best = {(size_t)box->run, 1, (size_t)box->run, (ptrdiff_t)box->run};
  size_t apart = (size_t)box->run; /* on the host */
  *along = -1;
  if (box->list != NULL) return best;
  for (int axis = box->axes - 1; axis >= 0; axis--) {
    struct rows rows = {(size_t)box->run, (size_t)box->counts[axis], apart, (ptrdiff_t)box->strides[axis]};
    if (rows.count > best.count && rows_at_once(&rows)) best = rows, *along = axis;
    apart *= rows.count;
  }
  return best;
}

static int64_t copies_of(const struct box *box) {
  int along;
  if (box->list != NULL) {
    bool together = box->strides[box->axes - 1] == box->run;
    return box_bytes(box) / box->run / box->list->count * (together ? box->list->runs : box->list->count);
  }
  return box_bytes(box) / box->run / (int64_t)rows_of(box, &along).count;
}

struct walk {
  const struct call *call;
  const struct box *box;
  bool up;
  int along;
  struct rows rows;
};

/* The parts along the axis with the list. */
static int copy_listed(const struct walk *walk, char *host, char *device) {
  const struct box *box = walk->box;
  int code = 0;
  for (int64_t i = 0, parts; i < box->list->count && code == 0; i += parts) {
    parts = parts_together(box, i);
    size_t bytes = (size_t)(parts * box->run);
    char *at = device + index_at(box->list, i) * box->strides[box->axes - 1];
    code = memory_copy_rows(walk->call->memory, walk->up, host + i * box->run, at,
                            (struct rows){bytes, 1, bytes, (ptrdiff_t)bytes}, walk->call->stream);
  }
  return code;
}

/* `apart`: bytes on the host between two parts of the previous axis. */
static int copy_axis(const struct walk *walk, int axis, int64_t apart, char *host, char *device) {
  const struct box *box = walk->box;
  if (axis == box->axes)
    return memory_copy_rows(walk->call->memory, walk->up, host, device, walk->rows, walk->call->stream);
  apart /= box->counts[axis];
  if (axis == walk->along) return copy_axis(walk, axis + 1, apart, host, device);
  if (box->list != NULL && axis == box->axes - 1) return copy_listed(walk, host, device);
  int code = 0;
  for (int64_t i = 0; i < box->counts[axis] && code == 0; i++)
    code = copy_axis(walk, axis + 1, apart, host + i * apart, device + i * box->strides[axis]);
  return code;
}

/* Copy a box of an array up from `host`, where it lies without gaps, or down to it. */
static int copy_box(const struct call *call, const struct box *box, bool up, char *host, void *array) {
  struct walk walk = {.call = call, .box = box, .up = up};
  walk.rows = rows_of(box, &walk.along);
  return copy_axis(&walk, 0, box_bytes(box), host, (char *)array + box->first);
}

/* --- whether --- */

/* Costs in bytes that are copied in the same time: of each copy, and of each row, which takes at least ROW. */
enum { ROW = 64 };
static int64_t cost_of(const struct box *box) {
  int64_t copies = copies_of(box), bytes = box_bytes(box), rows = box->list != NULL ? copies : bytes / box->run;
  return copies * runtime.copy_bytes + (bytes > rows * ROW ? bytes : rows * ROW);
}

/* Return whether a box has elements twice: these cannot be combined in a copy of the box. */
static bool repeats(const struct box *box) {
  if (box->list != NULL && !box->list->ascending) return true; /* or may do so */
  for (int axis = 0; axis < box->axes; axis++)
    if (box->strides[axis] == 0) return true;
  return false;
}

bool boxes_serve(const struct call *call, const struct plan *plan) {
  int64_t whole = 0, boxes = 0;
  for (int i = call->first[0]; i < call->first[2]; i++)
    whole += runtime.copy_bytes + (int64_t)buffer_bytes(&call->buffers[i]);
  for (int i = 0; i < plan->pack_count; i++) boxes += cost_of(&plan->packs[i]);
  for (int i = 0; i < plan->fill_count; i++) boxes += cost_of(&plan->fills[i]);
  for (int i = 0; i < plan->unpack_count; i++) {
    if (plan->combines && repeats(&plan->unpacks[i])) return false;
    boxes += cost_of(&plan->unpacks[i]) * (plan->combines ? 2 : 1) + (plan->combines ? runtime.copy_bytes : 0);
  }
  return boxes < whole || runtime.copy_bytes == 0;
}

/* --- a call --- */

static size_t align_box(int64_t bytes) { return ((size_t)bytes + 15) / 16 * 16; }

static size_t stage_bytes(const struct plan *plan) { return align_box(plan->sent + plan->received); }

static size_t filled_bytes(const struct plan *plan) {
  size_t bytes = 0;
  for (int i = 0; i < plan->fill_count; i++) bytes += align_box(box_bytes(&plan->fills[i]));
  return bytes;
}

size_t boxes_room(const struct plan *plan) {
  int64_t most = 0;
  for (int i = 0; i < plan->unpack_count && plan->combines; i++) {
    int64_t bytes = box_bytes(&plan->unpacks[i]);
    most = bytes > most ? bytes : most;
  }
  return stage_bytes(plan) + filled_bytes(plan) + (size_t)most;
}

ffi_error *boxes_down(const struct call *call, const struct plan *plan, char *room) {
  for (int i = 0; i < plan->pack_count; i++) {
    const struct box *box = &plan->packs[i];
    TRY_DRIVER(call, copy_box(call, box, false, room + box->stage, plan_operand(call, box->leaf)->data));
  }
  return NULL;
}

/* The work of a host function, which the stream calls in order. */
struct task {
  const struct plan *plan;
  const struct box *box;
  const struct datatype *type;
  char *to;
  const char *from;
};

static void fill_all(void *data) {
  struct task *task = data;
  char *to = task->to;
  for (int i = 0; i < task->plan->fill_count; i++) {
    const struct box whole = box_without_gaps(&task->plan->fills[i]);
    box_fill(&whole, to);
    to += align_box(box_bytes(&task->plan->fills[i]));
  }
  free(task);
}

static void combine_box(void *data) {
  struct task *task = data;
  const struct box whole = box_without_gaps(task->box);
  box_combine(&whole, task->plan->combines, task->type, task->to, task->from);
  free(task);
}

static ffi_error *enqueue(const struct call *call, void (*function)(void *), struct task what) {
  struct task *task = malloc(sizeof *task);
  if (task == NULL) return call_fail(call, FFI_INTERNAL, "no memory for a copy");
  *task = what;
  int code = call->memory->call(call->stream, function, task);
  if (code == 0) return NULL;
  free(task);
  return call_fail_driver(call, call->memory, code);
}

static ffi_error *fill_boxes(const struct call *call, const struct plan *plan, char *from) {
  if (plan->fill_count == 0) return NULL;
  ffi_error *error = enqueue(call, fill_all, (struct task){.plan = plan, .to = from});
  if (error != NULL) return error;
  for (int i = 0; i < plan->fill_count; i++) {
    const struct box *box = &plan->fills[i];
    TRY_DRIVER(call, copy_box(call, box, true, from, plan_result(call, box->leaf)->data));
    from += align_box(box_bytes(box));
  }
  return NULL;
}

ffi_error *boxes_up(const struct call *call, const struct plan *plan, char *room) {
  char *filled = room + stage_bytes(plan), *combined = filled + filled_bytes(plan);
  ffi_error *error = plan_begin(call, plan);
  if (error == NULL) error = fill_boxes(call, plan, filled);
  for (int i = 0; i < plan->unpack_count && error == NULL; i++) {
    const struct box *box = &plan->unpacks[i];
    const struct buffer *array = plan_result(call, box->leaf);
    char *from = room + box->stage;
    if (plan->combines) {
      TRY_DRIVER(call, copy_box(call, box, false, combined, array->data));
      const struct task task = {.plan = plan, .box = box, .type = array->type, .to = combined, .from = from};
      error = enqueue(call, combine_box, task);
      if (error != NULL) return error;
    }
    TRY_DRIVER(call, copy_box(call, box, true, plan->combines ? combined : from, array->data));
  }
  return error;
}
