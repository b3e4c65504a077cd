/* exchange: messages that a plan composes and takes apart. */
#include "core/plan.h"

#include <complex.h>
#include <math.h>

#include "base/float16.h"
#include "harness.h"

/* Rank 1 of 3 has two arrays: `a` of 4 x 6 floats and `b` of 5 doubles. It sends to 2 and receives from 0 and 2. */
enum { SIGNATURE = 4711, A = 24, B = 5 };
static float a[A], a_out[A];
static double b[B], b_out[B];

static struct plan *planned(const struct numbers *numbers) {
  struct plan *plan = plan_make(numbers->values, numbers->count);
  CHECK(plan != NULL);
  return plan;
}

/* Whether numbers describe a plan, which then stays reachable. */
static bool is_plan(const struct numbers *numbers) {
  const struct plan *plan = plan_make(numbers->values, numbers->count);
  return plan != NULL && COMM(plan) != 0;
}

/* To rank 2: column 1 of a, and b backwards without its ends. From rank 0: the last row of a. From rank 2: b[0], which
 * fills b[3] and b[4], too, if `adds` is not set: a box cannot be written twice, so it is sent twice. To itself:
 * a[0][0] goes to a[0][5]. Filled with 2.5: a[1][3] and a[1][4]. */
enum {
  TO_2 = 0,
  SENT_2 = LABEL_BYTES + 48,
  OWN = SENT_2,
  FROM_0 = OWN + 16,
  SENT_0 = LABEL_BYTES + 32,
  FROM_2 = FROM_0 + SENT_0
};
enum { GOT_2 = LABEL_BYTES + 16, STAGE = FROM_2 + GOT_2 };
static struct plan *plan_of_three(bool adds, int begin) {
  struct numbers n = {.count = 0};
  const float filling[] = {2.5f, 2.5f};
  int64_t value;
  memcpy(&value, filling, sizeof value);
  PUT(&n, SIGNATURE, 2, adds, begin, FROM_0, STAGE - FROM_0, 1, 2, 3, 1, 3, 0);
  PUT(&n, A, B, A, B);
  PUT(&n, 2, TO_2, SENT_2);
  PUT(&n, 0, FROM_0, SENT_0);
  PUT(&n, 2, FROM_2, GOT_2);
  PUT(&n, 0, TO_2 + LABEL_BYTES, 4, 4, 0, 0, 0, 1, 4, 24);       /* column 1: four runs of 4 bytes, 24 apart */
  PUT(&n, 1, TO_2 + LABEL_BYTES + 16, 24, 8, 0, 0, 0, 1, 3, -8); /* b[3], b[2], b[1] */
  PUT(&n, 0, OWN, 0, 4, 0, 0, 0, 0);
  PUT(&n, 0, 0, 36, 8, value, 0, 0, 0);
  PUT(&n, 0, OWN, 20, 4, 0, 0, 0, 0);
  PUT(&n, 0, FROM_0 + LABEL_BYTES, 72, 24, 0, 0, 0, 0); /* the last row */
  PUT(&n, 1, FROM_2 + LABEL_BYTES, 24, 8, 0, 0, 0, 1, 2, 8);
  return planned(&n);
}

static struct communicator *comm;
static uint64_t number;

void prepare(void) {
  fake->reset();
  comm = world(1, 3);
  number = atomic_load(&comm->planned) + 1;
  for (int i = 0; i < A; i++) a[i] = (float)(i + 1), a_out[i] = -1;
  for (int i = 0; i < B; i++) b[i] = 100 + i, b_out[i] = -1;
}

/* A message of another rank. */
static void deliver_as(int source, uint64_t signature, uint64_t call, const void *data, int64_t bytes, bool announced) {
  char message[4 * NOTICE_BYTES] = {0};
  struct plan plan = {.signature = signature};
  int64_t attributes[] = {0, derivative, 0};
  struct call made = {.operation = &operation_table[ROW_exchange]};
  memcpy(made.attributes, attributes, sizeof attributes);
  const struct peer peer = {.bytes = bytes};
  label_put(message, label_to(&peer, plan_label(&made, &plan, call)));
  if (data != NULL) memcpy(message + LABEL_BYTES, data, (size_t)bytes - LABEL_BYTES);
  fake->deliver(comm->handle, source, notices_tag(), message, announced ? LABEL_BYTES : bytes);
  if (announced) fake->deliver(comm->handle, source, plans_tag(), message, bytes);
}

static void deliver(int source, uint64_t signature, uint64_t call, const void *data, int64_t bytes) {
  deliver_as(source, signature, call, data, bytes, is_announced(&(struct peer){.bytes = bytes}));
}

static const float row[8] = {70, 71, 72, 73, 74, 75};
static const double two[2] = {8, 9};

static ffi_error *exchange_of(const struct plan *plan, void *a_result, void *b_result) {
  struct array in[] = {MATRIX(F32, a, 4, 6), ARRAY(F64, b, B)};
  struct array out[] = {MATRIX(F32, a_result, 4, 6), ARRAY(F64, b_result, B)};
  return run_lists("exchange", in, 2, out, 2, (const int64_t[]){COMM(comm), COMM(plan)});
}

static void deliver_all(void) {
  deliver(0, SIGNATURE, number, row, SENT_0);
  deliver(2, SIGNATURE, number, two, GOT_2);
}

TEST(boxes_travel) {
  const struct plan *plan = plan_of_three(false, BEGINS_AS_OPERANDS);
  for (derivative = 0; derivative < 3; derivative++)
    for (int aliased = 0; aliased < 2; aliased++) {
      prepare();
      deliver_all();
      float *x = aliased ? a : a_out;
      double *y = aliased ? b : b_out;
      SUCCEEDS(exchange_of(plan, x, y));
      for (int i = 0; i < A; i++) {
        float right = i == 5 ? 1 : i == 9 || i == 10 ? 2.5f : i >= 18 ? row[i - 18] : (float)(i + 1);
        CHECK(x[i] == right);
      }
      for (int i = 0; i < B; i++) CHECK(y[i] == (i < 3 ? 100 + i : two[i - 3]));
      CHECK_EQUAL(times_called("MPI_Isend"), 1);
      CHECK_EQUAL(called("MPI_Isend", 0)->peer, 2);
      CHECK_EQUAL(called("MPI_Isend", 0)->in_bytes, SENT_2);
      CHECK_EQUAL(called("MPI_Isend", 0)->tag, notices_tag());
      CHECK_EQUAL(atomic_load(&comm->planned), number);
    }
  derivative = 0;
}

/* What is sent: the test sends it to itself. */
TEST(messages_have_labels) {
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, 0, 1, LABEL_BYTES + 16, LABEL_BYTES + 16, 1, 1, 1, 0, 1, 0, B, B);
  PUT(&n, 1, 0, LABEL_BYTES + 16);
  PUT(&n, 1, LABEL_BYTES + 16, LABEL_BYTES + 16);
  PUT(&n, 0, LABEL_BYTES, 8, 16, 0, 0, 0, 0);
  PUT(&n, 0, LABEL_BYTES + 16 + LABEL_BYTES, 0, 16, 0, 0, 0, 0);
  struct plan *plan = planned(&n);
  SUCCEEDS(RUN("exchange", ARRAY(F64, b, B), ARRAY(F64, b_out, B), COMM(comm), COMM(plan)));
  for (int i = 0; i < B; i++) CHECK(b_out[i] == (i < 2 ? 101 + i : 0)); /* the others begin as zero */
  number++;
  derivative = 1; /* a value's message is not taken for a tangent's */
  SUCCEEDS(RUN("exchange", ARRAY(F64, b, B), ARRAY(F64, b_out, B), COMM(comm), COMM(plan)));
  derivative = 0;
}

TEST(another_message_is_an_error) {
  static const struct {
    uint64_t signature;
    int number, bytes;
  } others[] = {{SIGNATURE + 1, 0, SENT_0}, {SIGNATURE, 1, SENT_0},     {SIGNATURE, -1, SENT_0},
                {SIGNATURE, 0, SENT_0 - 8}, {SIGNATURE, 0, SENT_0 + 8}, {SIGNATURE, 0, NOTICE_BYTES + 8}};
  const struct plan *plan = plan_of_three(false, BEGINS_AS_OPERANDS);
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    prepare();
    deliver(0, others[i].signature, number + (uint64_t)(int64_t)others[i].number, NULL, others[i].bytes);
    deliver(2, SIGNATURE, number, two, GOT_2);
    FAILS(exchange_of(plan, a_out, b_out), FFI_FAILED_PRECONDITION, "jaxmpi.Grid.exchange",
          "rank 0 has sent something else");
    for (int k = 18; k < A; k++) CHECK(a_out[k] == (float)(k + 1)); /* nothing of it has arrived anywhere */
    CHECK_EQUAL(fake->queued, 0);
    prepare(); /* the next call is right again */
    deliver_all();
    SUCCEEDS(exchange_of(plan, a_out, b_out));
  }
}

/* Of words of four bytes: what is sent to rank 2, and what comes from ranks 0 and 2. */
TEST(messages_that_xla_composes) {
  enum { RECEIVED = SENT_0 + GOT_2 };
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 2, 0, BEGINS_AS_MESSAGES, SENT_2, RECEIVED, 1, 2, 0, 0, 0, 0, SENT_2 / 4, RECEIVED / 4);
  PUT(&n, 2, 0, SENT_2, 0, SENT_2, SENT_0, 2, SENT_2 + SENT_0, GOT_2);
  const int64_t attributes[] = {COMM(comm), COMM(planned(&n))};
  static uint32_t sent[SENT_2 / 4], received[RECEIVED / 4];
  const struct array in = ARRAY(S32, sent, SENT_2 / 4), out = ARRAY(S32, received, RECEIVED / 4);
  for (int i = LABEL_BYTES / 4; i < SENT_2 / 4; i++) sent[i] = (uint32_t)(1000 + i);
  deliver_all();
  SUCCEEDS(run_lists("exchange", &in, 1, &out, 1, attributes));
  CHECK_SAME((char *)received + LABEL_BYTES, row, SENT_0 - LABEL_BYTES);
  CHECK_SAME((char *)received + SENT_0 + LABEL_BYTES, two, sizeof two);
  CHECK_EQUAL(times_called("MPI_Isend"), 1);
  CHECK_EQUAL(called("MPI_Isend", 0)->peer, 2);
  CHECK_EQUAL(called("MPI_Isend", 0)->in_bytes, SENT_2);
  for (int i = LABEL_BYTES / 4; i < SENT_2 / 4; i++) CHECK_EQUAL(sent[i], (uint32_t)(1000 + i));
  number++;
  deliver(0, SIGNATURE + 1, number, row, SENT_0);
  deliver(2, SIGNATURE, number, two, GOT_2);
  FAILS(run_lists("exchange", &in, 1, &out, 1, attributes), FFI_FAILED_PRECONDITION, "has sent something else");
  for (int i = 0; i < RECEIVED / 4; i++) CHECK_EQUAL(received[i], UINT32_MAX);
  const struct array fewer = ARRAY(S32, received, RECEIVED / 4 - 1);
  FAILS(run_lists("exchange", &in, 1, &fewer, 1, attributes), FFI_INTERNAL, "reinstall");
  n.values[8] = 1; /* such a plan has no boxes */
  PUT(&n, 0, LABEL_BYTES, 0, 8, 0, 0, 0, 0);
  CHECK(!is_plan(&n));
}

TEST(arrays_must_be_those_of_the_plan) {
  const struct plan *plan = plan_of_three(false, BEGINS_AS_OPERANDS), *adding = plan_of_three(true, BEGINS_AS_OPERANDS);
  FAILS(RUN("exchange", ARRAY(F64, b, B), ARRAY(F64, b_out, B), COMM(comm), COMM(plan)), FFI_INTERNAL, "reinstall");
  struct array in[] = {MATRIX(F32, a, 4, 6), ARRAY(F64, b, B - 1)}, out[] = {MATRIX(F32, a_out, 4, 6), in[1]};
  FAILS(run_lists("exchange", in, 2, out, 2, (const int64_t[]){COMM(comm), COMM(plan)}), FFI_INTERNAL, "reinstall");
  in[0].dtype = out[0].dtype = BOOL; /* which is never added */
  in[1] = ARRAY(F64, b, B), out[1] = ARRAY(F64, b_out, B);
  FAILS(run_lists("exchange", in, 2, out, 2, (const int64_t[]){COMM(comm), COMM(adding)}), FFI_INTERNAL, "reinstall");
  CHECK_EQUAL(communications(), 0);
}

TEST(numbers_must_describe_a_plan) {
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, B, B);
  CHECK(is_plan(&n));
  n.count++;
  CHECK(!is_plan(&n));
  n.values[8] = 1; /* a box, of nine axes */
  n.count = 14;
  PUT(&n, 0, 0, 0, 8, 0, 0, 0, MAX_BOX_AXES + 1);
  CHECK(!is_plan(&n));
  n.count = 0; /* two boxes, in another order than in the stage */
  PUT(&n, SIGNATURE, 1, 0, 0, 32, 0, 0, 0, 2, 0, 0, 0, B, B);
  PUT(&n, 0, 16, 0, 8, 0, 0, 0, 0, 0, 0, 8, 8, 0, 0, 0, 0);
  CHECK(!is_plan(&n));
}

/* --- long messages --- */

enum { MOST_BYTES = 1 << 16, GUARD = 64 };

static int64_t box_bytes(const struct box *box) {
  int64_t bytes = box->run;
  for (int axis = 0; axis < box->axes; axis++) bytes *= box->counts[axis];
  return bytes;
}

/* Gathers `parts` parts for each of `rows` rows, and compares with each byte where it is to come from. */
static bool gathered(int64_t run, int64_t parts, int64_t rows, const struct indices *list, int64_t stage) {
  static char from[4 * MOST_BYTES], expected[MOST_BYTES + 2 * GUARD];
  _Alignas(64) static char message[MOST_BYTES + 2 * GUARD];
  const int64_t stride = run + 3, behind = 2 * parts * stride, first = 5;
  struct box box = {.axes = 2, .stage = stage, .first = first, .run = run, .list = list};
  const int axis = rows > 1;
  box.axes = axis + 1;
  box.counts[0] = rows, box.strides[0] = behind;
  box.counts[axis] = parts, box.strides[axis] = stride;
  const int64_t bytes = box_bytes(&box), at = GUARD + stage;
  box.streams = box_streams(&box, bytes + LABEL_BYTES);
  CHECK(bytes + at + GUARD <= (int64_t)sizeof message && first + rows * behind <= (int64_t)sizeof from);
  for (size_t i = 0; i < sizeof from; i++) from[i] = (char)(i % 251);
  memset(expected, 1, sizeof expected);
  for (int64_t i = 0; i < bytes; i++) {
    int64_t part = i / run % parts, place = list != NULL ? index_at(list, part) : part;
    expected[at + i] = from[first + i / run / parts * behind + place * stride + i % run];
  }
  for (int streams = 0; streams < 2; streams++) {
    memset(message, 1, sizeof message);
    box_gather(&box, from, message + at, streams);
    CHECK(memcmp(message, expected, sizeof message) == 0);
  }
  return box.streams;
}

TEST(long_messages_are_composed_alike) {
  int streamed = 0;
  FOR_VALUES (int64_t, run, 1, 2, 4, 8, 12, 16, 20, 24, 64, 68, 80, 100, 256, 260, 272, 300, 4096, 4100) {
    const int64_t parts = 20011 / *run + 1;
    int64_t *places = calloc((size_t)parts + 1, sizeof *places);
    for (int64_t i = 0; i < parts; i++) places[i] = (7 * i + 3) % parts;
    struct indices *narrow = indices_make(places, (size_t)parts);
    places[parts] = INT64_C(1) << 32;
    struct indices *wide = indices_make(places, (size_t)parts + 1);
    wide->count = parts;
    for (int64_t stage = 0; stage <= 16; stage += 8) { /* boxes of a message are aligned to 8 bytes */
      streamed += gathered(*run, parts, 1, NULL, stage);
      streamed += gathered(*run, parts, 1, narrow, stage);
      streamed += gathered(*run, parts, 1, wide, stage);
    }
    gathered(*run, parts / 16 + 1, 3, NULL, 0);
    if (*run <= 300) gathered(*run, 64, 3, NULL, 0);
    free(narrow), free(wide), free(places);
  }
#ifdef __SSE2__
  CHECK_EQUAL(streamed, 2 * 3 * 15); /* aligned ones, but for parts of 260, 300 and 4100 bytes */
  const struct box box = {.axes = 1, .run = 64, .counts = {1000}};
  CHECK(box_streams(&box, 1 << 14) && !box_streams(&box, 1 << 13));
#else
  CHECK_EQUAL(streamed, 0);
#endif
}

/* A box in which parts lie closest along another axis than the last one, gathered, scattered, and copied to a box that
 * is neither in this order nor in the order of a message. */
TEST(axes_in_another_order) {
  enum { MOST = 1 << 20 };
  static char array[MOST], other[MOST], back[MOST], message[MOST];
  for (size_t i = 0; i < MOST; i++) array[i] = (char)(i % 251 + i / 251);
  const int64_t counts[][3] = {{3, 70, 5}, {1, 33, 17}, {5, 8, 8}, {2, 530, 9}, {40, 1, 3}, {9, 16, 32}};
  const int orders[][3] = {{0, 2, 1}, {1, 2, 0}, {2, 1, 0}, {1, 0, 2}, {2, 0, 1}, {0, 1, 2}};
  FOR_VALUES (int64_t, run, 1, 2, 4, 8, 16, 32)
    for (int c = 0; c < 6; c++)
      for (int o = 0; o < 6; o++) {
        struct box boxes[2] = {{.axes = 3, .run = *run}, {.axes = 3, .run = *run}};
        for (int b = 0; b < 2; b++) { /* the array has the axes in this order, the innermost last, with gaps */
          int64_t stride = *run;
          for (int i = 2; i >= 0; i--) {
            int axis = orders[b == 0 ? o : (o + 2) % 6][i];
            boxes[b].counts[axis] = counts[c][axis];
            boxes[b].strides[axis] = stride;
            stride *= counts[c][axis] + 1;
          }
          if (c == 1) boxes[b].first = boxes[b].strides[2] * 16, boxes[b].strides[2] *= -1;
          CHECK(stride <= MOST);
        }
        memset(message, 1, sizeof message), memset(other, 2, sizeof other), memset(back, 3, sizeof back);
        box_gather(&boxes[0], array, message, true);
        box_copy(&boxes[0], array, &boxes[1], other);
        box_scatter(&boxes[1], back, message);
        const char *next = message;
        for (int64_t i = 0; i < counts[c][0]; i++)
          for (int64_t j = 0; j < counts[c][1]; j++)
            for (int64_t k = 0; k < counts[c][2]; k++, next += *run) {
              int64_t at[2];
              for (int b = 0; b < 2; b++)
                at[b] = boxes[b].first + i * boxes[b].strides[0] + j * boxes[b].strides[1] + k * boxes[b].strides[2];
              CHECK(memcmp(next, array + at[0], (size_t)*run) == 0);
              CHECK(memcmp(next, other + at[1], (size_t)*run) == 0 && memcmp(next, back + at[1], (size_t)*run) == 0);
              memset(other + at[1], 2, (size_t)*run), memset(back + at[1], 3, (size_t)*run);
            }
        CHECK_EQUAL(next - message, box_bytes(&boxes[0]));
        for (size_t i = 0; i < MOST; i++)
          CHECK(other[i] == 2 && back[i] == 3 && (i < (size_t)(next - message) || message[i] == 1));
      }
}

/* A period's tries choose the way that was faster in them, whatever the slowest of each was. */
TEST(a_trial_finds_the_faster_way) {
  struct trial trial = {0};
  for (int turn = 0; turn < 6; turn++) {
    const int faster = turn % 3 == 1; /* in one period; of equal ones it is the first */
    for (uint32_t i = 0; i < PERIOD; i++) {
      uint32_t number = trial_begin(&trial);
      CHECK_EQUAL(number, i);
      int way = trial_way(&trial, number);
      CHECK_EQUAL(way, number < 2 * TRIES ? number >= TRIES : faster);
      CHECK(trial_is_timed(number) == (number < 2 * TRIES && number % TRIES != 0));
      double seconds = number % TRIES == 3 ? 9 : turn % 3 == 2 || way == faster ? 2e-6 : 3e-6;
      if (trial_is_timed(number)) trial_end(&trial, number, seconds);
    }
  }
}

/* --- lists --- */

static const struct indices *listed(const int64_t *values, size_t count) {
  const struct indices *list = indices_make(values, count);
  CHECK(list != NULL);
  CHECK(COMM(list) != 0); /* where it stays reachable */
  return list;
}

/* From here on an index does not fit into 32 bits. */
static const int64_t BEYOND = (int64_t)INT32_MAX + 1;

TEST(what_is_known_of_a_list) {
  const int64_t values[] = {5, 6, 7, 2, 3, 3};
  const struct indices *list = listed(values, 6);
  CHECK(!list->wide && listed(values, 0)->count == 0);
  for (int i = 0; i < 6; i++) CHECK_EQUAL(index_at(list, i), values[i]);
  const int64_t far[] = {BEYOND, BEYOND + 1, 4};
  const struct indices *wide = listed(far, 3);
  CHECK(wide->wide && !listed(far + 2, 1)->wide);
  for (int i = 0; i < 3; i++) CHECK_EQUAL(index_at(wide, i), far[i]);
  CHECK(indices_make((const int64_t[]){3, -1}, 2) == NULL);
}

/* Of two batches of 7 rows four become four others of the result, which begins as zero. The lists have 32 or 64 bits:
 * then the box begins as far before the array as its indices lie behind it. */
enum { ROWS = 7, BATCHES = 2, CHOSEN = 4, MOST_RUN = 100 };
TEST(listed_rows_travel) {
  static const int64_t read[CHOSEN] = {5, 0, 3, 3}, written[CHOSEN] = {1, 6, 2, 4};
  static unsigned char x[BATCHES * ROWS * MOST_RUN], y[sizeof x];
  for (int wide = 0; wide < 2; wide++) {
    int64_t places[2][CHOSEN], beyond = wide ? BEYOND : 0;
    for (int i = 0; i < CHOSEN; i++) places[0][i] = read[i] + beyond, places[1][i] = written[i] + beyond;
    const struct indices *lists[] = {listed(places[0], CHOSEN), listed(places[1], CHOSEN)};
    FOR_VALUES (int64_t, length, 1, 2, 3, 4, 8, 12, 16, 32, 48, 64, MOST_RUN) {
      const int64_t bytes = BATCHES * ROWS * *length, stage = BATCHES * CHOSEN * *length;
      context("wide %d, run %d", wide, (int)*length);
      prepare();
      struct numbers n = {.count = 0};
      PUT(&n, SIGNATURE, 1, 0, BEGINS_AS_ZERO, stage, 0, 0, 0, 1, 0, 1, 0, bytes, bytes);
      for (int side = 0; side < 2; side++)
        PUT(&n, 0, 0, -beyond * *length, *length, 0, 0, COMM(lists[side]), 2, BATCHES, ROWS * *length, CHOSEN, *length);
      fill(x, sizeof x);
      blank(y, sizeof y);
      SUCCEEDS(RUN("exchange", ARRAY(U8, x, bytes), ARRAY(U8, y, bytes), COMM(comm), COMM(planned(&n))));
      for (int64_t row = 0; row < BATCHES * ROWS; row++) {
        const unsigned char *from = NULL;
        for (int i = 0; i < CHOSEN; i++)
          if (row % ROWS == written[i]) from = x + (row - row % ROWS + read[i]) * *length;
        for (int64_t k = 0; k < *length; k++) CHECK_EQUAL(y[row * *length + k], from != NULL ? from[k] : 0);
      }
      CHECK(is_blank(y, (size_t)bytes, sizeof y));
    }
  }
}

/* Numbers of any type, from a double, which holds small ones exactly. */
#define STORE(its, type, number) \
  if (code == (its)) memcpy(to, &(type){(type)(number)}, sizeof(type))
static void put_number(int code, void *to, double value) {
  STORE(BOOL, bool, value != 0);
  STORE(2, int8_t, value);
  STORE(S16, int16_t, value);
  STORE(S32, int32_t, value);
  STORE(5, int64_t, value);
  STORE(U8, uint8_t, value);
  STORE(7, uint16_t, value);
  STORE(8, uint32_t, value);
  STORE(9, uint64_t, value);
  STORE(F16, uint16_t, float16_from_float((float)value));
  STORE(BF16, uint16_t, bfloat16_from_float((float)value));
  STORE(F32, float, value);
  STORE(F64, double, value);
  STORE(15, float _Complex, value * (1.0 + 2.0 * I));
  STORE(C128, double _Complex, value * (1.0 + 2.0 * I));
}

static double combined(enum combination how, double a, double b) {
  return how == COMBINE_SUM ? a + b : how == COMBINE_MAX ? (a > b ? a : b) : a < b ? a : b;
}

/* Rows of one element or of two, of which one receives twice, by a list, or all, by a stride of 0. */
TEST(rows_are_combined) {
  static const int64_t to[][3] = {{4, 4, 4}, {3, 1, 3}};
  enum { COUNT = 5, GIVEN = 3 };
  const struct indices *list = listed(to[1], GIVEN);
  FOR_VALUES (int, code, BOOL, 2, S16, S32, 5, U8, 7, 8, 9, F16, F32, F64, 15, BF16, C128)
    for (enum combination how = COMBINE_SUM; how < COMBINATIONS; how++)
      for (int way = 0; way < 4; way++) {
        const int width = 1 + way / 2, by_list = way % 2;
        const struct datatype *type = datatype_find(*code);
        const bool is_complex = *code == 15 || *code == C128, is_truth = *code == BOOL;
        const bool possible = how == COMBINE_SUM ? !is_truth : !is_complex;
        const int64_t bytes = (int64_t)type->bytes, length = width * bytes, elements = COUNT * width;
        unsigned char x[2 * COUNT * 16], y[sizeof x], right[sizeof x];
        double values[2 * COUNT], results[2 * COUNT];
        context("%s, combination %d, rows of %d, by a list: %d", type->name, (int)how, width, by_list);
        prepare();
        for (int i = 0; i < elements; i++) {
          results[i] = values[i] = is_truth ? i % 3 == 1 : (i * 7 + 3) % 11 - (*code > 5 && *code < 10 ? 0 : 4);
          put_number(*code, x + i * bytes, values[i]);
        }
        for (int i = 0; i < GIVEN * width; i++) { /* the first rows */
          double *its = &results[to[by_list][i / width] * width + i % width];
          *its = combined(how, *its, values[i]);
        }
        for (int i = 0; i < elements; i++) put_number(*code, right + i * bytes, results[i]);
        struct numbers n = {.count = 0};
        PUT(&n, SIGNATURE, 1, (int64_t)how, 0, GIVEN * length, 0, 0, 0, 1, 0, 1, 0, elements, elements);
        PUT(&n, 0, 0, 0, GIVEN * length, 0, 0, 0, 0);
        PUT(&n, 0, 0, by_list ? 0 : 4 * length, length, 0, 0, by_list ? COMM(list) : 0, 1, GIVEN, by_list ? length : 0);
        const struct plan *plan = planned(&n);
        ffi_error *error =
            RUN("exchange", ARRAY(*code, x, elements), ARRAY(*code, y, elements), COMM(comm), COMM(plan));
        if (!possible)
          FAILS(error, FFI_INTERNAL, "reinstall");
        else if (SUCCEEDS(error))
          CHECK_SAME(y, right, elements * bytes);
      }
}

TEST(nan_wins) {
  float x[] = {NAN, 1, 2, NAN}, y[4];
  for (enum combination how = COMBINE_MAX; how <= COMBINE_MIN; how++) {
    struct numbers n = {.count = 0};
    prepare();
    PUT(&n, SIGNATURE, 1, (int64_t)how, 0, 8, 0, 0, 0, 1, 0, 1, 0, 4, 4);
    PUT(&n, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 8, 8, 0, 0, 0, 0);
    SUCCEEDS(RUN("exchange", ARRAY(F32, x, 4), ARRAY(F32, y, 4), COMM(comm), COMM(planned(&n))));
    CHECK(y[1] == 1 && y[2] != y[2] && y[3] != y[3]);
  }
}

TEST(lists_must_fit) {
  const struct indices *list = listed((const int64_t[]){0, 2}, 2);
  static const struct {
    int64_t known, axes, count;
    bool right;
  } boxes[] = {{1, 1, 2, true}, {1, 1, 3, false}, {1, 0, 2, false}, {0, 1, 2, false}};
  for (size_t i = 0; i < sizeof boxes / sizeof *boxes; i++) {
    struct numbers n = {.count = 0};
    PUT(&n, SIGNATURE, 1, 0, 0, 16, 0, 0, 0, 1, 0, 0, 0, B, B);
    PUT(&n, 0, 0, 0, 8, 0, 0, boxes[i].known ? COMM(list) : 1, boxes[i].axes);
    if (boxes[i].axes > 0) PUT(&n, boxes[i].count, 8);
    CHECK(is_plan(&n) == boxes[i].right);
  }
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, COMBINATIONS, 0, 0, 0, 0, 0, 0, 0, 0, 0, B, B);
  CHECK(!is_plan(&n));
}

/* This rank's own part of a transpose by blocks: of a matrix of 4 x 6 it keeps the right half, which becomes rows 2 and
 * 3 of one of 4 x 6 beside the other half of another rank, in the first columns. The result begins as `begin`. */
enum { HALF = 4 * 3 * 4, COVERED_STAGE = LABEL_BYTES + HALF };
static const float other_half[12] = {50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61};
static struct plan *transposing(int begin, int pairs, int64_t count_there) {
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, 0, begin, COVERED_STAGE + HALF, COVERED_STAGE, 1, 1, 2, 0, 2, pairs, A, A);
  PUT(&n, 2, 0, COVERED_STAGE, 2, COVERED_STAGE + HALF, COVERED_STAGE);
  PUT(&n, 0, LABEL_BYTES, 0, 12, 0, 0, 0, 1, 4, 24);    /* the left half leaves */
  PUT(&n, 0, COVERED_STAGE, 12, 12, 0, 0, 0, 1, 4, 24); /* the right half stays */
  for (int own = !pairs, i = 0; i < 2; i++, own = !own) /* in the order of the stage, but pairs come last */
    if (own)
      PUT(&n, 0, COVERED_STAGE, 12, 12, 0, 0, 0, 1, count_there, 24);
    else
      PUT(&n, 0, COVERED_STAGE + HALF + LABEL_BYTES, 0, 12, 0, 0, 0, 1, 4, 24);
  return plan_make(n.values, n.count);
}

static ffi_error *transpose_by(const struct plan *plan) {
  function = FUNCTION_redistribute;
  return RUN("exchange", MATRIX(F32, a, 4, 6), MATRIX(F32, a_out, 4, 6), COMM(comm), COMM(plan));
}

TEST(own_parts_are_copied_at_once) {
  for (int begin = BEGINS_AS_ZERO; begin <= BEGINS_COVERED; begin++)
    for (int pairs = 0; pairs < 2; pairs++) {
      const struct plan *plan = transposing(begin, pairs, 4);
      CHECK(plan != NULL);
      prepare();
      deliver(2, SIGNATURE, number, other_half, COVERED_STAGE);
      SUCCEEDS(transpose_by(plan));
      for (int i = 0; i < A; i++) CHECK(a_out[i] == (i % 6 < 3 ? other_half[i / 6 * 3 + i % 6] : (float)(i + 1)));
      CHECK_EQUAL(called("MPI_Isend", 0)->in_bytes, COVERED_STAGE);
    }
}

/* What was in the memory of a result that begins as it is never looks like its numbers. */
TEST(nothing_is_left_after_an_error) {
  const struct plan *plan = transposing(BEGINS_COVERED, 1, 4);
  FOR_VALUES (string, function, NULL, "MPI_Irecv", "MPI_Isend", "MPI_Wait") {
    prepare();
    deliver(2, SIGNATURE + (*function == NULL), number, other_half, COVERED_STAGE);
    if (*function != NULL) fake->fail(*function, 1, 16);
    FAILS(transpose_by(plan), *function == NULL ? FFI_FAILED_PRECONDITION : FFI_INTERNAL, "jaxmpi.redistribute",
          *function == NULL ? "something else" : *function);
    for (int i = 0; i < A; i++) CHECK(a_out[i] != a_out[i]);
    fake->reset();
  }
}

/* From ranks 0 and 2 a half each, of which the second one is wrong. */
TEST(parts_are_left_out_after_an_error) {
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, 0, BEGINS_AS_ZERO, 0, 2 * COVERED_STAGE, 0, 2, 0, 0, 2, 0, A, A);
  PUT(&n, 0, 0, COVERED_STAGE, 2, COVERED_STAGE, COVERED_STAGE);
  PUT(&n, 0, LABEL_BYTES, 0, 12, 0, 0, 0, 1, 4, 24);
  PUT(&n, 0, COVERED_STAGE + LABEL_BYTES, 12, 12, 0, 0, 0, 1, 4, 24);
  const struct plan *plan = planned(&n);
  for (int wrong = 0; wrong < 2; wrong++) {
    prepare();
    deliver(0, SIGNATURE, number, other_half, COVERED_STAGE);
    deliver(2, SIGNATURE + (uint64_t)wrong, number, other_half, COVERED_STAGE);
    if (wrong)
      FAILS(transpose_by(plan), FFI_FAILED_PRECONDITION, "rank 2 has sent something else");
    else
      SUCCEEDS(transpose_by(plan));
    for (int i = 0; i < A; i++) CHECK(wrong ? a_out[i] != a_out[i] : a_out[i] == other_half[i / 6 * 3 + i % 3]);
  }
}

/* --- messages of many ranks, short and long --- */

/* Rank 0 of 12 sends each other rank as many elements as it receives from it: every third message is a long one. */
enum { RANKS = 12, LENGTHY = NOTICE_BYTES / 8 + 4, OF_ALL = RANKS * LENGTHY };
static int64_t elements_of(int rank) { return rank % 3 == 0 ? LENGTHY : rank; }
static int64_t bytes_of(int rank) { return LABEL_BYTES + 8 * elements_of(rank); }
static double many[OF_ALL], many_out[OF_ALL];

static const struct plan *plan_of_many(void) {
  struct numbers n = {.count = 0};
  int64_t half = 0;
  for (int rank = 1; rank < RANKS; rank++) half += bytes_of(rank);
  PUT(&n, SIGNATURE, 1, 0, BEGINS_AS_ZERO, half, half, RANKS - 1, RANKS - 1, RANKS - 1, 0, RANKS - 1, 0);
  PUT(&n, OF_ALL, OF_ALL);
  for (int64_t side = 0, at = 0; side < 2; side++)
    for (int rank = 1; rank < RANKS; at += bytes_of(rank++)) PUT(&n, rank, at, bytes_of(rank));
  for (int64_t side = 0, at = 0; side < 2; side++)
    for (int rank = 1; rank < RANKS; at += bytes_of(rank++))
      PUT(&n, 0, at + LABEL_BYTES, 8 * LENGTHY * rank, 8 * elements_of(rank), 0, 0, 0, 0);
  return planned(&n);
}

/* The messages of all others, of which that of `wrong` (0: none) has another signature, or as many elements more. */
static void deliver_many(int wrong, int64_t more) {
  static double values[2 * LENGTHY];
  fake->reset();
  comm = world(0, RANKS);
  number = atomic_load(&comm->planned) + 1;
  for (int i = 0; i < OF_ALL; i++) many[i] = i + 1, many_out[i] = -1;
  for (int rank = 1; rank < RANKS; rank++) {
    for (int i = 0; i < 2 * LENGTHY; i++) values[i] = 1000 * rank + i;
    bool other = rank == wrong;
    deliver(rank, SIGNATURE + (uint64_t)(other && more == 0), number, values, bytes_of(rank) + (other ? 8 * more : 0));
  }
}

static ffi_error *exchange_many(const struct plan *plan) {
  return RUN("exchange", ARRAY(F64, many, OF_ALL), ARRAY(F64, many_out, OF_ALL), COMM(comm), COMM(plan));
}

static void check_many(void) {
  for (int rank = 0; rank < RANKS; rank++)
    for (int64_t i = 0; i < LENGTHY; i++)
      CHECK(many_out[rank * LENGTHY + i] == (rank > 0 && i < elements_of(rank) ? 1000.0 * rank + (double)i : 0.0));
  CHECK_EQUAL(fake->queued, 0);
  CHECK_EQUAL(atomic_load(&fake->live_requests), 0);
}

/* Also where others are posted on the communicator, so that messages are matched in the order of the queue. */
TEST(short_and_long_messages_of_many) {
  const struct plan *plan = plan_of_many();
  for (int queued = 0; queued < 2; queued++) {
    deliver_many(0, 0);
    atomic_fetch_add(&comm->queued, queued);
    SUCCEEDS(exchange_many(plan));
    atomic_fetch_add(&comm->queued, -queued);
    check_many();
    CHECK_EQUAL(times_called("MPI_Irecv"), queued ? 0 : RANKS - 1);
    CHECK_EQUAL(times_called("MPI_Isend"), RANKS - 1 + 3);
    for (int rank = 1, at = 0; rank < RANKS; rank++, at++) {
      const struct fake_call *sent = called("MPI_Isend", at);
      if (rank % 3 == 0) {
        CHECK_EQUAL(sent->tag, notices_tag());
        CHECK_EQUAL(sent->in_bytes, LABEL_BYTES);
        sent = called("MPI_Isend", ++at);
      }
      check_envelope(sent, rank, rank % 3 == 0 ? plans_tag() : notices_tag());
      CHECK_EQUAL(sent->in_bytes, bytes_of(rank));
    }
  }
}

/* The same message in each call, whichever way it is composed in. */
TEST(long_messages_are_the_same_in_all_tries) {
  const struct plan *plan = plan_of_many();
  for (int turn = 0; turn < 3 * TRIES; turn++) {
    deliver_many(0, 0);
    for (int i = 0; i < OF_ALL; i++) many[i] = turn + i;
    SUCCEEDS(exchange_many(plan));
    int streams = 0;
    for (int rank = 1, at = 0; rank < RANKS; rank++, at++) {
      const struct peer *peer = &plan->sends[rank - 1];
      const struct fake_call *sent = called("MPI_Isend", at += is_announced(peer));
      CHECK_EQUAL(sent->in_bytes, bytes_of(rank));
      CHECK(memcmp((const char *)sent->in + LABEL_BYTES, &many[rank * LENGTHY], (size_t)bytes_of(rank) - LABEL_BYTES) ==
            0);
      streams += peer->streams;
    }
#ifdef __SSE2__
    CHECK_EQUAL(streams, 3);
#endif
  }
}

/* Where a message is short enough to come alone, but its label comes first. */
TEST(what_another_build_announces) {
  const struct plan *plan = plan_of_three(false, BEGINS_AS_OPERANDS);
  deliver(0, SIGNATURE, number, row, SENT_0);
  deliver_as(2, SIGNATURE, number, two, GOT_2, true);
  SUCCEEDS(exchange_of(plan, a_out, b_out));
  for (int i = 0; i < B; i++) CHECK(b_out[i] == (i < 3 ? 100 + i : two[i - 3]));
  CHECK_EQUAL(fake->queued, 0);
}

/* Whichever message is another one, and of whatever length, also as long as a notice can be: nothing is left of it. */
TEST(any_message_may_be_wrong) {
  const struct plan *plan = plan_of_many();
  for (int way = 0; way < 3; way++)
    for (int rank = 1; rank < RANKS; rank++)
      FOR_VALUES (int64_t, its, 0, 1, 100, LENGTHY - RANKS - 4, LENGTHY - 2, -1, 4 - LENGTHY) {
        const int queued = way == 1;
        if (elements_of(rank) + *its <= 0) continue;
        char text[64];
        int length = snprintf(text, sizeof text, "rank %d has sent something else", rank);
        if (*its != 0)
          snprintf(text + length, sizeof text - (size_t)length, " (%d bytes", (int)(bytes_of(rank) + 8 * *its));
        deliver_many(rank, *its);
        fake->backwards = way == 2; /* so that others have come before it is written over them */
        atomic_fetch_add(&comm->queued, queued);
        FAILS(exchange_many(plan), FFI_FAILED_PRECONDITION, "jaxmpi.Grid.exchange", text);
        atomic_fetch_add(&comm->queued, -queued);
        for (int i = 0; i < OF_ALL; i++) CHECK(many_out[i] != many_out[i]);
        CHECK_EQUAL(fake->queued, 0);
        CHECK_EQUAL(atomic_load(&fake->live_requests), 0);
      }
  deliver_many(0, 0);
  SUCCEEDS(exchange_many(plan));
  check_many();
}

/* Each call of MPI fails in turn; MPI keeps no memory of the call. */
TEST(any_call_may_fail) {
  static const char *const functions[] = {"MPI_Irecv", "MPI_Isend", "MPI_Wait", "MPI_Mprobe", "MPI_Mrecv"};
  static const int times[] = {RANKS - 1, RANKS + 2, 2 * RANKS + 1, 3, 3};
  const struct plan *plan = plan_of_many();
  for (size_t k = 0; k < sizeof times / sizeof *times; k++)
    for (int nth = 1; nth <= times[k]; nth++) {
      context("%s, call %d", functions[k], nth);
      deliver_many(0, 0);
      fake->fail(functions[k], nth, 16);
      FAILS(exchange_many(plan), FFI_INTERNAL, "jaxmpi.Grid.exchange", functions[k]);
      for (int i = 0; i < OF_ALL; i++) CHECK(many_out[i] != many_out[i]);
      CHECK_EQUAL(atomic_load(&fake->live_requests), 0);
      if (k == 0) CHECK_EQUAL(fake->queued, 0); /* where messages cannot be expected they are matched */
    }
}

/* Also within their part of the stage. */
TEST(messages_must_be_in_order) {
  enum { BYTES = LABEL_BYTES + 8 };
  static const struct {
    int64_t sends[2], receives[2];
    bool right;
  } cases[] = {{{0, BYTES}, {2 * BYTES, 3 * BYTES}, true},      {{BYTES, 0}, {2 * BYTES, 3 * BYTES}, false},
               {{0, BYTES - 1}, {2 * BYTES, 3 * BYTES}, false}, {{-1, BYTES}, {2 * BYTES, 3 * BYTES}, false},
               {{0, BYTES + 1}, {2 * BYTES, 3 * BYTES}, false}, {{0, BYTES}, {3 * BYTES, 2 * BYTES}, false},
               {{0, BYTES}, {2 * BYTES - 1, 3 * BYTES}, false}, {{0, BYTES}, {2 * BYTES, 3 * BYTES + 1}, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct numbers n = {.count = 0};
    PUT(&n, SIGNATURE, 1, 0, 0, 2 * BYTES, 2 * BYTES, 2, 2, 0, 0, 0, 0, B, B);
    for (int k = 0; k < 2; k++) PUT(&n, k, cases[i].sends[k], BYTES);
    for (int k = 0; k < 2; k++) PUT(&n, k, cases[i].receives[k], BYTES);
    CHECK(is_plan(&n) == cases[i].right);
  }
}

TEST(pairs_must_be_alike) {
  CHECK(transposing(BEGINS_AS_OPERANDS, 1, 4) == NULL); /* where the result may be the operand */
  CHECK(transposing(BEGINS_COVERED, 1, 3) == NULL);
  CHECK(transposing(BEGINS_COVERED, 3, 4) == NULL);
  CHECK(transposing(BEGINS_COVERED, -1, 4) == NULL);
}
