/* Random frames: whatever XLA passes, a call ends with a result or an error of ours; nothing crashes, leaks or stays
 * locked. AddressSanitizer and UBSan see what this program does not.
 *
 * Half of the frames are sound: buffers are as large as they must be and not a byte larger. The others have any number
 * of buffers, of any types and sizes, in memory that is large enough for all, and attributes of any values; of those
 * that are objects, numbers of objects of their kind or of none. */
#include <fcntl.h>

#include "core/plan.h"
#include "requests/table.h"
#include "observe/timeline.h"
#include "harness.h"

enum { FRAMES = 20000, MOST_ELEMENTS = 40, MOST_SIZE = 4, POOL = 1 << 16 };

static _Alignas(16) unsigned char pool[POOL];
static _Alignas(16) unsigned char statuses[128];
static void *taken[2 * MAX_ARRAYS];
static int taken_count, succeeded;

static int any_type(void) {
  int known = 0, codes[DTYPE_CODES];
  for (const struct datatype *row = datatype_table; row->name != NULL; row++) codes[known++] = row->code;
  return codes[draw((uint32_t)known)];
}

/* An array in memory of exactly its size. */
static struct array sound_array(int dtype, int64_t count) {
  size_t bytes = (size_t)count * datatype_find(dtype)->bytes;
  void *data = malloc(bytes > 0 ? bytes : 1);
  if (data == NULL) abort();
  fill(data, bytes);
  taken[taken_count++] = data;
  return ARRAY(dtype, data, count);
}

static struct array any_array(void) {
  int dtype = once_in(20) ? (int)draw(60) - 10 : any_type(), rank = (int)draw(4);
  struct array array = {dtype, pool, rank, {0}};
  for (int i = 0; i < rank; i++) array.dims[i] = draw(rank == 1 ? MOST_ELEMENTS : 4);
  return array;
}

/* The last of three elements becomes the first; also of more or fewer arrays than are passed. */
static const struct plan *any_plan(void) {
  static const struct plan *made[2];
  static const int64_t numbers[] = {1, 1, 0, 0, 16, 0, 0, 0, 1, 0, 1, 0, 3, 3, 0,
                                    0, 2, 1, 0, 0,  0, 0, 0, 0, 0, 1, 0, 0, 0, 0};
  static const int64_t of_two[] = {1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3};
  if (made[0] == NULL) made[0] = plan_make(numbers, sizeof numbers / sizeof *numbers);
  if (made[1] == NULL) made[1] = plan_make(of_two, sizeof of_two / sizeof *of_two);
  return made[once_in(3)];
}

static int64_t any_attribute(enum attribute kind, const struct communicator *comm) {
  static const char *const reductions[] = {"SUM", "PROD", "MAX", "MIN"};
  int64_t special[] = {fake->any_source, fake->any_tag, fake->proc_null, -1, INT64_MAX, INT64_MIN, INT32_MAX, 1 << 24};
  if (once_in(30) && kind != KIND_DERIVATIVE && kind != KIND_ADJOINT && kind != KIND_LEAF && kind != KIND_NUMBER &&
      kind != KIND_PLAIN)
    return special[draw(8)];
  if (kind == KIND_RANK) return draw((uint32_t)comm->size + (once_in(10) ? 2 : 0));
  if (kind == KIND_TAG) return draw(3);
  if (kind == KIND_DERIVATIVE || kind == KIND_LEAF) return draw(4);
  if (kind == KIND_FUNCTION) return draw(FUNCTION_COUNT + 1);
  if (kind == KIND_ADJOINT) return draw(2);
  if (kind == KIND_REDUCTION) return reduction(reductions[draw(4)]);
  if (kind == KIND_NUMBER) return (int64_t)draw(6) - (once_in(5) ? 1 : 0);
  if (kind == KIND_PLAIN) return once_in(2) ? any_type() : (int64_t)draw(20) - (once_in(5) ? 1 : 0);
  if (kind == KIND_OBJECT_OR_0) return once_in(2) ? 0 : COMM(statuses);
  return kind == KIND_PLAN ? COMM(any_plan()) : COMM(comm);
}

/* How many elements a buffer of an operation has on a rank where the largest part of one rank has `count`. */
static int64_t elements(const struct operation *row, bool written, int64_t count, int size) {
  enum divisibility how = row->divisibility;
  bool all = how == DIVIDE_EXCHANGES || (how == DIVIDE_GATHERS && written) || (how == DIVIDE_SCATTERS && !written);
  return all ? count * size : count;
}

struct lists {
  struct array in[MAX_ARRAYS], out[MAX_ARRAYS];
  int in_count, out_count;
};

static void make_sound(struct lists *lists, const struct operation *row, const struct communicator *comm,
                       int64_t root) {
  int dtype = any_type();
  bool is_root = comm->rank == root, joined = row->buffer_count > 0 && row->buffers[0].joined;
  bool reads = row->row != ROW_recv && row->row != ROW_barrier, writes = reads && row->row != ROW_send;
  if (row->row == ROW_recv) writes = true;
  if (row->row == ROW_bcast) reads = is_root, writes = !is_root;
  if (row->row == ROW_scatter) reads = is_root;
  if (row->row == ROW_gather || row->row == ROW_reduce) writes = is_root;
  int count = joined && once_in(3) ? 1 + (int)draw(20) : 1;
  for (int i = 0; i < count; i++) {
    int64_t n = draw(MOST_ELEMENTS);
    if (reads) lists->in[lists->in_count++] = sound_array(dtype, elements(row, false, n, comm->size));
    if (writes) lists->out[lists->out_count++] = sound_array(dtype, elements(row, true, n, comm->size));
  }
}

/* The same of an operation with counts of rows: `row` elements each. */
static void make_rows(struct lists *lists, const struct operation *row, const struct communicator *comm, int64_t root,
                      int64_t elements_of_row) {
  int dtype = any_type();
  struct array counts[2] = {sound_array(S32, comm->size), sound_array(S32, comm->size)};
  int64_t sum[2] = {0, 0}, own, width = elements_of_row > 0 ? elements_of_row : 0;
  for (int k = 0; k < 2; k++)
    for (int r = 0; r < comm->size; r++) {
      int32_t *count = &((int32_t *)counts[k].data)[r];
      *count = k == 1 && r == comm->rank ? ((int32_t *)counts[0].data)[r] : (int32_t)draw(4);
      sum[k] += *count;
    }
  own = ((int32_t *)counts[0].data)[comm->rank];
  bool to_all = row->row == ROW_allgatherv || row->row == ROW_gatherv, two = row->row == ROW_alltoallv;
  if (row->row != ROW_scatterv || comm->rank == root)
    lists->in[lists->in_count++] = sound_array(dtype, width * (to_all ? own : sum[0]));
  lists->in[lists->in_count++] = counts[0];
  if (two) lists->in[lists->in_count++] = counts[1];
  if (row->row != ROW_gatherv || comm->rank == root)
    lists->out[lists->out_count++] = sound_array(dtype, width * (two ? sum[1] : to_all ? sum[0] : own));
}

static int64_t attribute(const struct operation *row, const int64_t attributes[], const char *name) {
  for (int i = 0; i < row->attribute_count; i++)
    if (strcmp(row->attributes[i].name, name) == 0) return attributes[i];
  return -1;
}

/* The same of what starts an operation, or of a wait for what no number stands for. */
static void make_request(struct lists *lists, const struct operation *row, const struct communicator *comm,
                         int64_t attributes[]) {
  bool starts = !waits_for_request(row->row);
  bool passed = row->row != ROW_irecv && row->row != ROW_ibarrier && row->row != ROW_wait;
  int64_t count = draw(MOST_ELEMENTS);
  if (row->row == ROW_ialltoall) count *= comm->size;
  if (attribute_of(row, KIND_PLAN) >= 0) count = 3;
  if (row->row == ROW_ibcast) {
    passed = comm->rank == attribute(row, attributes, "root");
    count = attribute(row, attributes, "count");
    passed &= count >= 0;
  }
  if (passed) lists->in[lists->in_count++] = sound_array(any_type(), count);
  struct array id = sound_array(F32, 2 * (once_in(3) ? draw(3) : 1));
  if (!starts) lists->in[lists->in_count++] = id;
  if (starts || once_in(2)) lists->out[lists->out_count++] = starts ? id : sound_array(any_type(), count);
}

/* Waits for what a frame has started: for what it is of, or in a few cases for something else. */
static void settle(const struct operation *row, struct communicator *comm, struct lists *lists,
                   const int64_t attributes[]) {
  struct array in[2] = {lists->out[0]}, out[1] = {ARRAY(F32, pool, 3)};
  int results = row->row != ROW_isend && row->row != ROW_ibarrier;
  int64_t source = attribute(row, attributes, "source"), tag = attribute(row, attributes, "tag");
  const char *wait = "wait";
  if (row->row == ROW_irecv || row->row == ROW_ibcast)
    out[0] = ARRAY((int)attribute(row, attributes, "dtype"), pool, attribute(row, attributes, "count"));
  else if (results)
    out[0] = lists->in[0];
  if (row->row == ROW_irecv)
    fake->deliver(comm->handle, source < 0 ? 0 : (int)source, tag < 0 ? 0 : (int)tag, pool, draw(MOST_ELEMENTS * 8));
  bool planned = attribute_of(row, KIND_PLAN) >= 0;
  if (planned != once_in(20)) {
    wait = "exchange_finish";
    in[1] = in[0], in[0] = planned ? lists->in[0] : out[0];
  }
  if (once_in(10)) out[0] = ARRAY(any_type(), pool, draw(MOST_ELEMENTS));
  out[0].data = pool + POOL / 2;
  static struct frame f;
  frame_make_lists(
      &f, wait, in, wait[0] == 'w' ? 1 : 2, out, once_in(20) ? 1 - results : results,
      wait[0] == 'w' ? (const int64_t[]){COMM(comm), 0} : (const int64_t[]){COMM(comm), COMM(any_plan()), 0});
  ffi_error *error = frame_call(&f, wait);
  if (error != NULL) error_free(error);
  if (requests_in_flight() == 0) return;
  frame_make_lists(&f, "wait", &lists->out[0], 1, NULL, 0, (const int64_t[]){COMM(comm), 0});
  error = frame_call(&f, "wait");
  if (error != NULL) error_free(error);
}

static void make_any(struct lists *lists) {
  lists->in_count = (int)(once_in(10) ? draw(MAX_ARRAYS) : draw(4));
  lists->out_count = (int)(once_in(10) ? draw(MAX_ARRAYS) : draw(4));
  for (int i = 0; i < lists->in_count; i++) lists->in[i] = any_array();
  for (int i = 0; i < lists->out_count; i++) lists->out[i] = any_array();
  for (int i = 0; i < lists->out_count; i++) lists->out[i].data = pool + POOL / 2;
}

/* Spoils what XLA passes besides buffers. */
static void spoil(struct frame *f, int attributes) {
  int at = attributes > 0 ? (int)draw((uint32_t)attributes) : 0;
  uint32_t what = draw(5);
  if (what == 0) f->frame.attributes.size = draw(MAX_ATTRIBUTES + 2);
  if (what == 1) f->attribute_types[at] = (int)draw(6);
  if (what == 2) f->spans[at] = (ffi_span){"tag", draw(4)};
  if (what == 3) f->scalars[at].dtype = (int)draw(12);
  if (what == 4) f->frame.stage = (enum ffi_stage)(draw(6));
  if (once_in(5)) f->frame.operands.size = draw((uint32_t)f->frame.operands.size + 1);
}

static struct communicator *any_communicator(void) {
  int size = 1 + (int)draw(MOST_SIZE);
  struct communicator *comm = world((int)draw((uint32_t)size), size);
  fake->reset();
  comm->chunk = once_in(3) ? LEAST_CHUNK : 0;
  runtime.max_count = once_in(4) ? 1 + draw(7) : 1 << 30;
  runtime.serialize = once_in(2);
  int64_t compared = once_in(3) ? INT64_MAX : once_in(2) ? draw(3) : 0;
  compare_on(comm, compared, NULL);
  atomic_store(&runtime.labels, once_in(2));
  static const char *const functions[] = {"MPI_Allreduce",   "MPI_Mrecv",      "MPI_Isend",   "MPI_Wait",
                                          "MPI_Type_commit", "MPI_Iallreduce", "MPI_Improbe", "MPI_Test"};
  fake->alike = once_in(2);
  if (once_in(10)) fake->fail(functions[draw(sizeof functions / sizeof *functions)], 1 + (int)draw(2), 77);
  for (int source = 0; source < size; source++)
    if (once_in(2)) fake->deliver(comm->handle, source, (int)draw(3), pool, draw(MOST_ELEMENTS * 8));
  return comm;
}

static int64_t root_of(const struct operation *row, const int64_t attributes[]) {
  for (int i = 0; i < row->attribute_count; i++)
    if (row->attributes[i].kind == KIND_RANK) return attributes[i];
  return -1;
}

/* Any but those with objects that only the core itself passes: see sharded/sharded.h. */
static const struct operation *any_row(void) {
  uint32_t row;
  do row = draw(ROW_sums); /* which is the first of the tests' own: more_ops.def */
  while (row == ROW_connect || row == ROW_complete || row == ROW_done || row == ROW_outside);
  return &operation_table[row];
}

/* Whether it ended well. */
static bool one_frame(int number) {
  bool good = true;
  static struct lists lists;
  static struct frame f;
  const struct operation *row = any_row();
  struct communicator *comm = any_communicator();
  int64_t attributes[MAX_ATTRIBUTES];
  bool sound = once_in(2) && row->row != ROW_check;
  context("frame %d, %s of %s", number, sound ? "a sound one" : "any", row->id);
  for (int i = 0; i < row->attribute_count; i++) attributes[i] = any_attribute(row->attributes[i].kind, comm);
  attributes[row->comm] = sound || !once_in(30) ? COMM(comm) : attributes[row->comm];
  lists.in_count = lists.out_count = 0;
  int number_at = attribute_of(row, KIND_NUMBER);
  if (sound && number_at >= 0)
    make_rows(&lists, row, comm, root_of(row, attributes), attributes[number_at]);
  else if (sound && has_request(row))
    make_request(&lists, row, comm, attributes);
  else if (sound)
    make_sound(&lists, row, comm, root_of(row, attributes));
  else
    make_any(&lists);
  frame_make_lists(&f, row->id, lists.in, lists.in_count, lists.out, lists.out_count, attributes);
  for (int i = 0; i < row->attribute_count; i++) f.attributes[i] = attributes[i];
  bool spoilt = !sound && once_in(3);
  f.frame.stage = FFI_STAGE_INSTANTIATE;
  if (spoilt) spoil(&f, row->attribute_count);
  ffi_error *error = frame_call(&f, row->id);
  if (error == NULL && !spoilt) {
    f.frame.stage = FFI_STAGE_EXECUTE;
    error = frame_call(&f, row->id);
  }
  succeeded += error == NULL;
  if (error != NULL) {
    good = CHECK(strncmp(error->text, "jaxmpi", 6) == 0);
    error_free(error);
  }
  if (requests_in_flight() > 0) settle(row, comm, &lists, attributes);
  good &= CHECK_EQUAL(requests_in_flight(), 0);
  good &= CHECK_EQUAL(fake->live_types + fake->live_requests, 0);
  bool unlocked = CHECK_EQUAL(pthread_mutex_trylock(&runtime.lock), 0);
  if (unlocked) pthread_mutex_unlock(&runtime.lock);
  while (taken_count > 0) free(taken[--taken_count]);
  return good && unlocked;
}

static void run_frames(uint64_t seed) {
  draw_state = seed;
  succeeded = 0;
  int i = 0;
  while (i < FRAMES && one_frame(i)) i++;
  CHECK_EQUAL(i, FRAMES);
  CHECK(succeeded > FRAMES / 10 && succeeded < FRAMES / 10 * 9); /* both ends are reached */
  fake->reset();
}

TEST(no_frame_crashes) { run_frames(1); }

TEST(nor_with_a_timeline) {
  char folder[] = "/tmp/jaxmpi-test-XXXXXX", file[64];
  if (mkdtemp(folder) == NULL) abort();
  snprintf(file, sizeof file, "%s/frames.json", folder);
  CHECK_EQUAL(timeline_open(open(file, O_WRONLY | O_CREAT | O_APPEND, 0600), 1 << 20), 0);
  run_frames(2);
  timeline_close();
  CHECK_EQUAL(unlink(file), 0);
  CHECK_EQUAL(rmdir(folder), 0);
}
