/* Plans of arrays on device memory: random boxes, copied by the driver, against the same call on the host. */
#include "core/failure.h"
#include "core/plan.h"
#include "devices/transport.h"
#include "simulated.h"

enum { ARRAYS_AT_MOST = 3, MOST_AXES = 3, MOST_SIDE = 12, MOST_MOVES = 6, PLANS = 300, ROOM = 4096 };
static const int64_t ALWAYS = 0, NEVER = 1ll << 40; /* of runtime.copy_bytes */

/* --- plans --- */

static struct plan *planned(const struct numbers *numbers) {
  struct plan *plan = plan_make(numbers->values, numbers->count);
  if (plan == NULL) abort();
  registered(plan); /* where it stays reachable */
  return plan;
}

/* An array: its elements along each axis. */
struct shape {
  int dtype, axes;
  int64_t bytes, dims[MOST_AXES];
};

static int64_t elements_of(const struct shape *shape) {
  int64_t elements = 1;
  for (int axis = 0; axis < shape->axes; axis++) elements *= shape->dims[axis];
  return elements;
}

/* A list of so many indices below `room`, ascending or in any order; with `repeats` some may occur twice. */
static int64_t draw_list(int64_t count, int64_t room, bool repeats) {
  int64_t values[MOST_SIDE];
  int64_t left = room, taken = 0;
  for (int64_t i = 0; i < room; i++)
    if (draw((uint32_t)(left--)) < count - taken) values[taken++] = i;
  for (int64_t i = count - 1; i > 0 && once_in(2); i--) {
    int64_t k = draw((uint32_t)i + 1), value = values[i];
    values[i] = values[k], values[k] = value;
  }
  if (repeats && once_in(2)) values[0] = values[count - 1];
  struct indices *list = indices_make(values, (size_t)count);
  if (list == NULL) abort();
  return registered(list);
}

/* A box of an array with that many elements along each axis: it begins anywhere where it fits, with any steps, or they
 * are listed. Step 0 stands for elements that are read several times. */
static void put_box(struct numbers *n, int leaf, int64_t stage, const struct shape *shape, const int64_t *counts,
                    bool repeats, int64_t value) {
  int64_t first = 0, stride = shape->bytes, run = shape->bytes, list = 0;
  int64_t strides[MOST_AXES], starts[MOST_AXES], steps[MOST_AXES];
  for (int axis = shape->axes - 1; axis >= 0; axis--) {
    int64_t room = shape->dims[axis], count = counts[axis];
    int64_t step = repeats && once_in(6) ? 0 : count > 1 ? 1 + draw((uint32_t)((room - 1) / (count - 1))) : 1;
    int64_t length = step * (count - 1) + 1, start = draw((uint32_t)(room - length + 1));
    if (once_in(4)) start += length - 1, step = -step;
    first += starts[axis] = start * stride;
    strides[axis] = step * stride;
    steps[axis] = stride;
    stride *= room;
  }
  int axes = shape->axes;
  while (axes > 0 && strides[axes - 1] == run && once_in(2)) run *= counts[--axes];
  if (axes > 0 && once_in(3)) {
    list = draw_list(counts[axes - 1], shape->dims[axes - 1], repeats);
    first -= starts[axes - 1];
    strides[axes - 1] = steps[axes - 1];
  }
  PUT(n, leaf, stage, first, run, value, value, list, axes);
  for (int axis = 0; axis < axes; axis++) PUT(n, counts[axis], strides[axis]);
}

static int64_t aligned(int64_t bytes) { return (bytes + 7) / 8 * 8; }

/* What a rank of two sends to itself as a message, and without one; what is filled. */
static const struct plan *draw_plan(const struct shape *shapes, int arrays, int combines) {
  struct numbers n = {.count = 0};
  int moves = (int)draw(MOST_MOVES + 1), own = (int)draw((uint32_t)moves + 1), fills = (int)draw(3);
  int leaves[MOST_MOVES];
  int64_t counts[MOST_MOVES][MOST_AXES], places[MOST_MOVES], message = LABEL_BYTES, own_bytes = 0;
  for (int i = 0; i < moves; i++) {
    const struct shape *shape = &shapes[leaves[i] = (int)draw((uint32_t)arrays)];
    int64_t bytes = shape->bytes;
    for (int axis = 0; axis < shape->axes; axis++) bytes *= counts[i][axis] = 1 + draw((uint32_t)shape->dims[axis]);
    places[i] = message;
    message += aligned(bytes);
    if (i == own - 1)
      own_bytes = message, message = LABEL_BYTES; /* the first `own` are no message, and lie behind it */
  }
  bool travels = own < moves;
  int64_t length = travels ? message : 0, sent = length + own_bytes;
  PUT(&n, 4711, arrays, combines, once_in(3), sent, length, travels, travels, moves, fills, moves, 0);
  for (int i = 0; i < 2 * arrays; i++) PUT(&n, elements_of(&shapes[i % arrays]));
  for (int i = 0; i < 2 * travels; i++) PUT(&n, 1, i * sent, length);
  for (int k = 0; k < moves; k++) { /* as they lie in the stage */
    int i = (k + own) % moves;
    put_box(&n, leaves[i], i < own ? length + places[i] : places[i], &shapes[leaves[i]], counts[i], true, 0);
  }
  for (int i = 0; i < fills; i++) {
    int leaf = (int)draw((uint32_t)arrays);
    int64_t filled[MOST_AXES], value = once_in(2) ? 0 : 0x4040000040400000;
    for (int axis = 0; axis < shapes[leaf].axes; axis++) filled[axis] = 1 + draw((uint32_t)shapes[leaf].dims[axis]);
    put_box(&n, leaf, 0, &shapes[leaf], filled, false, value);
  }
  for (int i = 0; i < moves; i++)
    put_box(&n, leaves[i], i < own ? length + places[i] : sent + places[i], &shapes[leaves[i]], counts[i],
            combines && once_in(4), 0);
  return planned(&n);
}

/* --- calls --- */

/* The arrays of a call: on the host, or copied to the device and back. */
struct set {
  int arrays;
  struct shape shapes[ARRAYS_AT_MOST];
  bool aliased[ARRAYS_AT_MOST];
  double in[ARRAYS_AT_MOST][ROOM], out[ARRAYS_AT_MOST][ROOM];
};

static void begin(struct set *set) {
  for (int i = 0; i < ARRAYS_AT_MOST; i++)
    for (int k = 0; k < ROOM; k++) {
      if (set->shapes[i].dtype == F32) {
        for (int half = 0; half < 2; half++) ((float *)set->in[i])[2 * k + half] = (float)(1 + i + 3 * k + half);
      } else {
        set->in[i][k] = 1 + i + 2 * k;
      }
      set->out[i][k] = -1;
    }
}

static ffi_error *call_in(const struct memory *memory, struct set *set, const struct plan *plan) {
  struct array in[ARRAYS_AT_MOST], out[ARRAYS_AT_MOST];
  const int64_t attributes[] = {registered(world(1, 2)), registered(plan)};
  for (int i = 0; i < set->arrays; i++) {
    int64_t elements = elements_of(&set->shapes[i]);
    if (set->aliased[i]) memcpy(set->out[i], set->in[i], (size_t)(elements * set->shapes[i].bytes));
    in[i] = ARRAY(set->shapes[i].dtype, set->aliased[i] ? set->out[i] : set->in[i], elements);
    out[i] = ARRAY(set->shapes[i].dtype, set->out[i], elements);
  }
  if (memory->host) return run_lists("exchange", in, set->arrays, out, set->arrays, attributes);
  return call_there("exchange", in, set->arrays, out, set->arrays, attributes, NULL);
}

static void draw_set(struct set *set) {
  static const int dtypes[] = {F32, F64, F64};
  set->arrays = 1 + (int)draw(ARRAYS_AT_MOST);
  for (int i = 0; i < ARRAYS_AT_MOST; i++) {
    struct shape *shape = &set->shapes[i];
    shape->dtype = dtypes[draw(3)];
    shape->bytes = shape->dtype == F32 ? 4 : 8;
    shape->axes = 1 + (int)draw(MOST_AXES);
    for (int axis = 0; axis < shape->axes; axis++) shape->dims[axis] = 1 + draw(MOST_SIDE);
    set->aliased[i] = once_in(2);
  }
}

static struct set on_host, on_device;

TEST(random_boxes) {
  draw_state = 88172645463325252ull;
  driver->slow = false;
  int boxed = 0;
  for (int i = 0; i < PLANS; i++) {
    int combines = once_in(3) ? 1 + (int)draw(COMBINATIONS - 1) : COMBINE_NOT;
    draw_set(&on_host);
    const struct plan *plan = draw_plan(on_host.shapes, on_host.arrays, combines);
    for (int way = 0; way < 6; way++) {
      runtime.transport = transports[way / 2];
      runtime.copy_bytes = way % 2 == 0 ? ALWAYS : NEVER;
      context("plan %d, %s, %s", i, transport_names[runtime.transport], way % 2 == 0 ? "boxes" : "whole arrays");
      on_device = on_host;
      fake->reset();
      begin(&on_host);
      SUCCEEDS(call_in(&memory_host, &on_host, plan));
      fake->reset();
      begin(&on_device);
      int before = driver->calls("cuMemcpy2DAsync") + driver->calls("hipMemcpy2DAsync");
      SUCCEEDS(call_in(space, &on_device, plan));
      boxed += driver->calls("cuMemcpy2DAsync") + driver->calls("hipMemcpy2DAsync") > before;
      for (int k = 0; k < on_host.arrays; k++) CHECK_SAME(on_device.out[k], on_host.out[k], sizeof on_host.out[k]);
    }
  }
  CHECK(boxed > PLANS);
  driver->slow = true;
}

/* Of a large array two columns travel, one is filled, and one is added to. */
static struct plan *plan_of_columns(int64_t side, bool adds) {
  const int64_t column = 8 * side, message = LABEL_BYTES + 2 * column, row = 8 * side;
  struct numbers n = {.count = 0};
  PUT(&n, 4711, 1, adds, 0, message, message, 1, 1, 1, 1, 1, 0);
  PUT(&n, side * side, side * side);
  PUT(&n, 1, 0, message, 1, message, message);                                 /* to itself */
  PUT(&n, 0, LABEL_BYTES, 8, 16, 0, 0, 0, 1, side, row);                       /* columns 1 and 2 */
  PUT(&n, 0, 0, 24, 8, 0, 0, 0, 1, side, row);                                 /* column 3 becomes zero */
  PUT(&n, 0, message + LABEL_BYTES, 8 * side - 16, 16, 0, 0, 0, 1, side, row); /* the last two */
  return planned(&n);
}

enum { SIDE = 64 };

static void set_square(struct set *set, bool aliased) {
  set->arrays = 1;
  set->shapes[0] = (struct shape){F64, 2, 8, {SIDE, SIDE}};
  set->aliased[0] = aliased;
  begin(set);
}

TEST_THROUGH(on_all, only_what_travels_is_copied, void) {
  runtime.copy_bytes = 64;
  for (int adds = 0; adds < 2; adds++) {
    const struct plan *plan = plan_of_columns(SIDE, adds);
    context("%s, adds %d", transport_names[runtime.transport], adds);
    driver->reset();
    set_square(&on_device, true);
    SUCCEEDS(call_in(space, &on_device, plan));
    for (int i = 0; i < SIDE; i++)
      for (int k = 0; k < SIDE; k++) {
        double own = 1 + 2 * (i * SIDE + k), other = 1 + 2 * (i * SIDE + k - SIDE + 3);
        double right = k == 3 ? 0 : k < SIDE - 2 ? own : adds ? own + other : other;
        CHECK(on_device.out[0][i * SIDE + k] == right);
      }
    CHECK_EQUAL(driver->calls("cuMemcpy2DAsync") + driver->calls("hipMemcpy2DAsync"), adds ? 4 : 3);
    CHECK_EQUAL(driver->calls("cuMemcpyDtoHAsync") + driver->calls("cuMemcpyHtoDAsync"), 0);
    CHECK_EQUAL(driver->calls("hipMemcpyAsync"), 0);
  }
}

/* Of an array 100 rows in three runs travel to its end: each run is one copy. Rows here and there are so many copies
 * that the whole array costs less. */
static const struct plan *plan_of_list(const struct indices *list, int64_t rows, int64_t row) {
  const int64_t count = list->count, message = LABEL_BYTES + count * row;
  struct numbers n = {.count = 0};
  PUT(&n, 4711, 1, 0, 0, message, message, 1, 1, 1, 0, 1, 0, rows * row / 8, rows * row / 8);
  PUT(&n, 1, 0, message, 1, message, message); /* to itself */
  PUT(&n, 0, LABEL_BYTES, 0, row, 0, 0, registered(list), 1, count, row);
  PUT(&n, 0, message + LABEL_BYTES, (rows - count) * row, count * row, 0, 0, 0, 0);
  return planned(&n);
}

TEST(consecutive_indices_are_one_copy) {
  enum { ROWS = 512, ROW = 8, COUNT = 100 };
  runtime.copy_bytes = 64;
  runtime.transport = TRANSPORT_WAIT;
  for (int scattered = 0; scattered < 2; scattered++) {
    int64_t values[COUNT];
    for (int64_t i = 0; i < COUNT; i++) values[i] = scattered ? 3 * i + 1 : i + (i < 30 ? 7 : i < 40 ? 100 : 50);
    struct indices *list = indices_make(values, COUNT);
    if (list == NULL) abort();
    CHECK_EQUAL(list->runs, scattered ? COUNT : 3);
    const struct plan *plan = plan_of_list(list, ROWS, ROW);
    context("scattered %d", scattered);
    fake->reset();
    driver->reset();
    on_device.arrays = 1;
    on_device.shapes[0] = (struct shape){F64, 1, 8, {ROWS}};
    on_device.aliased[0] = true;
    begin(&on_device);
    SUCCEEDS(call_in(space, &on_device, plan));
    for (int i = 0; i < ROWS; i++)
      CHECK(on_device.out[0][i] == 1 + 2.0 * (double)(i < ROWS - COUNT ? i : values[i - ROWS + COUNT]));
    int copies =
        driver->calls("cuMemcpyDtoHAsync") + driver->calls("cuMemcpyHtoDAsync") + driver->calls("hipMemcpyAsync");
    CHECK_EQUAL(copies, scattered ? 2 : 4);
  }
}

/* --- errors --- */

static ffi_error *call_again(void *plan) {
  set_square(&on_device, false);
  return call_in(space, &on_device, plan);
}

TEST_THROUGH(on_all, failures_of_the_driver_are_errors, void) {
  runtime.copy_bytes = ALWAYS;
  driver->slow = false;
  for (int adds = 0; adds < 2; adds++)
    driver_fails(adds ? "a sum" : "a copy", "exchange", call_again, plan_of_columns(SIDE, adds));
  driver->slow = true;
}

/* Where nobody waits an error of MPI is the next operation's: all bits of what was to be received are set. */
TEST_THROUGH(on_all, errors_are_deferred, void) {
  const struct plan *plan = plan_of_columns(SIDE, false);
  runtime.copy_bytes = ALWAYS;
  fake->fail("MPI_Mprobe", 1, 16);
  set_square(&on_device, false);
  ffi_error *error = call_in(space, &on_device, plan);
  if (runtime.transport == TRANSPORT_WAIT) {
    FAILS(error, FFI_INTERNAL, "MPI_Mprobe failed");
    fake->reset();
    return;
  }
  SUCCEEDS(error);
  for (int i = 0; i < SIDE * SIDE; i++) {
    double got = on_device.out[0][i], right = i % SIDE == 3 ? 0 : 1 + 2 * i;
    CHECK(i % SIDE < SIDE - 2 ? got == right : got != got);
  }
  fake->reset();
  FAILS(call_in(space, &on_device, plan), FFI_INTERNAL, "an operation before it has failed", "MPI_Mprobe failed");
}

/* Arrays that are not those of the plan are not touched. */
TEST(arrays_must_be_those_of_the_plan) {
  const struct plan *plan = plan_of_columns(SIDE - 1, false);
  runtime.copy_bytes = ALWAYS;
  runtime.transport = TRANSPORT_WAIT;
  set_square(&on_device, false);
  FAILS(call_in(space, &on_device, plan), FFI_INTERNAL, "reinstall");
  CHECK_EQUAL(communications(), 0);
}
