/* Requests: what starts, what waits for it, and what happens meanwhile. */
#include <math.h>

#include "core/plan.h"
#include "execute/compare.h"
#include "harness.h"
#include "requests/progress.h"
#include "requests/table.h"

/* Tags below TAGS are those of users; with the limit MOST_TAG the next are those of notices and of plans. */
enum { PLACE = 1, SIZE = 4, N = 7, ROOM = 1024, CODE = 77, MOST_TAG = 127, TAGS = 61, OF_DERIVATIVES = 64 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM], message[ROOM];
static float id[2], other[2];

void prepare(void) {
  fake->reset();
  progress_patience = 100000000000000; /* the tests look for messages themselves */
  runtime.most_tag = MOST_TAG;
  fill(in, ROOM);
  fill(message, ROOM);
  for (int i = 0; i < ROOM; i++) message[i] ^= 0x55;
  blank(out, ROOM);
}

static struct communicator *here(void) { return world(PLACE, SIZE); }

#define START(operation, given, id, ...) RUN(operation, given, ARRAY(F32, id, 2), __VA_ARGS__)

static ffi_error *wait_on(const struct communicator *comm, float *numbers, struct array result) {
  return RUN("wait", ARRAY(F32, numbers, 2), result, COMM(comm), 0);
}

static ffi_error *start_receive(float *numbers, int dtype, int count, int source, int tag) {
  return START("irecv", NONE, numbers, COMM(here()), count, dtype, source, tag);
}

/* The wait for a receive of four bytes, which are right. */
static void wait_for_four(float *numbers, const unsigned char *right) {
  SUCCEEDS(wait_on(here(), numbers, ARRAY(U8, out, 4)));
  CHECK_SAME(out, right, 4);
}

static void deliver(int source, int tag, int64_t bytes) { fake->deliver(here()->handle, source, tag, message, bytes); }

/* As another wait would, or the thread. */
static void look_for_messages(void) { queue_match(); }

/* When a message comes: before its receive starts, before the wait, found by another before the wait, or late. */
enum { BEFORE, THEN, FOUND, LATE, WHENS };
static void let_come(int when) {
  if (when == LATE) fake->unheard = 5;
  if (when == FOUND) look_for_messages();
}

/* Nothing is left in MPI, and nothing in flight: also after each test. */
void check_after(void) {
  CHECK_EQUAL(fake->live_requests + fake->live_matched + fake->live_types, 0);
  CHECK_EQUAL(requests_in_flight() + queue_posted() + atomic_load(&here()->queued), 0);
}

/* --- each operation --- */

/* What is started of `elements` has a copy: afterwards they are changed and freed. */
static ffi_error *start_of(const char *operation, const struct share *s, int elements, const int64_t attributes[]) {
  size_t bytes = (size_t)elements * datatype_find(s->dtype)->bytes;
  void *given = malloc(bytes + 1);
  if (given == NULL) abort();
  memcpy(given, in, bytes);
  ffi_error *error = run(operation, ARRAY(s->dtype, given, elements), ARRAY(F32, id, 2), attributes);
  blank(given, bytes);
  free(given);
  CHECK_EQUAL(requests_in_flight(), queue_posted() + (error == NULL));
  CHECK(is_blank(out, 0, ROOM));
  return error;
}
#define START_OF(operation, s, elements, ...) start_of(operation, s, elements, (const int64_t[]){__VA_ARGS__})

static void wait_for_all_of(const struct share *s, int elements) {
  SUCCEEDS(wait_on(s->comm, id, ARRAY(s->dtype, out, elements)));
  CHECK(is_blank(out, (size_t)elements * datatype_find(s->dtype)->bytes, ROOM));
}

/* Each alone, with a limit that divides it, and while a message is expected, so that a wait may not leave all to MPI.
 */
static int way;
static void (*body_of_way)(const struct share *);
static void in_this_way(const struct share *s) {
  int64_t comm = COMM(s->comm);
  unsigned char byte;
  if (way & 2) SUCCEEDS(START("irecv", NONE, other, comm, 1, U8, 0, TAGS - 1));
  fake->slow = way & 2 ? 3 : 0;
  body_of_way(s);
  fake->deliver(s->comm->handle, 0, TAGS - 1, message, 1);
  if (way & 2)
    SUCCEEDS(wait_on(s->comm, other, ARRAY(U8, &byte, 1)));
  else
    SUCCEEDS(RUN("recv", NONE, ARRAY(U8, &byte, 1), comm, 0, 0, TAGS - 1));
  CHECK_EQUAL(byte, message[0]);
  check_after();
}

static void in_all_ways(void (*body)(const struct share *)) {
  body_of_way = body;
  for (way = 0; way < 4; way++) {
    runtime.max_count = way & 1 ? 3 : INT32_MAX;
    for_all(in_this_way);
  }
}

static void check_reduced(const struct share *s) {
  for (size_t i = 0; i < s->bytes; i++)
    if (!CHECK_EQUAL(out[i], (unsigned char)(in[i] + s->size))) return;
}

static int chunks_of(const struct share *s) { return runtime.max_count == 3 && s->count > 3 ? (s->count + 2) / 3 : 1; }

TEST_OF(in_all_ways, iallreduce_reduces) {
  SUCCEEDS(START_OF("iallreduce", s, s->count, COMM(s->comm), reduction("SUM")));
  CHECK_EQUAL(times_called("MPI_Iallreduce"), chunks_of(s));
  CHECK_EQUAL(called("MPI_Iallreduce", 0)->op, operation_handle("SUM"));
  wait_for_all_of(s, s->count);
  check_reduced(s);
}

TEST_OF(in_all_ways, ireduce_is_zero_elsewhere) {
  for (int root = 0; root < s->size; root++) {
    blank(out, ROOM);
    SUCCEEDS(START_OF("ireduce", s, s->count, COMM(s->comm), reduction("MAX"), root));
    CHECK_EQUAL(called("MPI_Ireduce", 0)->peer, 0);
    wait_for_all_of(s, s->count);
    if (root == s->rank)
      check_reduced(s);
    else
      CHECK(is_zero(out, 0, s->bytes));
  }
  CHECK_EQUAL(times_called("MPI_Ireduce"), s->size * chunks_of(s));
}

TEST_OF(in_all_ways, ialltoall_exchanges) {
  SUCCEEDS(START_OF("ialltoall", s, s->size * s->count, COMM(s->comm)));
  wait_for_all_of(s, s->size * s->count);
  for (int r = 0; r < s->size; r++)
    for (size_t i = 0; i < s->bytes; i++) {
      size_t at = (size_t)r * s->bytes + i;
      if (!CHECK_EQUAL(out[at], (unsigned char)(in[at] + r - s->rank))) return;
    }
  CHECK_EQUAL(times_called("MPI_Ialltoall"), 1);
}

TEST_OF(in_all_ways, ibarrier_has_no_result) {
  SUCCEEDS(START("ibarrier", NONE, id, COMM(s->comm)));
  CHECK_EQUAL(called("MPI_Ibarrier", 0)->comm, s->comm->handle);
  SUCCEEDS(wait_on(s->comm, id, NONE));
}

TEST_OF(in_all_ways, ibcast_hands_out) {
  for (int root = 0; root < s->size; root++) {
    blank(out, ROOM);
    if (root == s->rank)
      SUCCEEDS(START_OF("ibcast", s, s->count, COMM(s->comm), s->count, s->dtype, root));
    else
      SUCCEEDS(START("ibcast", NONE, id, COMM(s->comm), s->count, s->dtype, root));
    CHECK_EQUAL(called("MPI_Ibcast", root)->peer, root);
    wait_for_all_of(s, s->count);
    if (root == s->rank) CHECK_SAME(out, in, s->bytes);
    for (size_t i = 0; root != s->rank && i < s->bytes; i++) CHECK_EQUAL(out[i], fake_byte(root, (int64_t)i));
  }
}

TEST_OF(in_all_ways, hold_holds) {
  int before = communications();
  SUCCEEDS(START_OF("hold", s, s->count, COMM(s->comm)));
  wait_for_all_of(s, s->count);
  CHECK_SAME(out, in, s->bytes);
  CHECK_EQUAL(communications(), before);
}

TEST_OF(in_all_ways, isend_sends_a_copy) {
  int dest = (s->rank + 1) % s->size;
  SUCCEEDS(START_OF("isend", s, s->count, COMM(s->comm), dest, 9));
  const struct fake_call *call = called("MPI_Isend", 0);
  CHECK_EQUAL(call->in_bytes, s->bytes);
  check_envelope(call, dest, 9);
  SUCCEEDS(wait_on(s->comm, id, NONE));
  if (dest != s->rank) return;
  SUCCEEDS(RUN("recv", NONE, ARRAY(s->dtype, out, s->count), COMM(s->comm), dest, 0, 9));
  CHECK_SAME(out, in, s->bytes);
}

TEST_OF(in_all_ways, irecv_receives) {
  for (int when = 0; when < WHENS; when++) {
    blank(out, ROOM);
    if (when == BEFORE) fake->deliver(s->comm->handle, 0, 5, message, (int64_t)s->bytes);
    SUCCEEDS(START("irecv", NONE, id, COMM(s->comm), s->count, s->dtype, 0, 5));
    if (when != BEFORE) fake->deliver(s->comm->handle, 0, 5, message, (int64_t)s->bytes);
    let_come(when);
    CHECK_EQUAL(fake->queued, when != FOUND);
    CHECK_EQUAL(fake->live_requests, when == FOUND);
    wait_for_all_of(s, s->count);
    CHECK_SAME(out, message, s->bytes);
    fake->unheard = 0;
  }
}

TEST(nobody_has_requests) {
  SUCCEEDS(START("isend", ARRAY(F32, in, N), id, COMM(here()), fake->proc_null, 3));
  SUCCEEDS(wait_on(here(), id, NONE));
  SUCCEEDS(start_receive(id, F32, N, fake->proc_null, 3));
  CHECK_EQUAL(queue_posted(), 0);
  SUCCEEDS(wait_on(here(), id, ARRAY(F32, out, N)));
  CHECK(is_zero(out, 0, 4 * N) && is_blank(out, 4 * N, ROOM));
}

/* --- numbers --- */

TEST(a_second_wait_is_an_error) {
  SUCCEEDS(START("hold", ARRAY(F32, in, N), id, COMM(here())));
  float first[2] = {id[0], id[1]};
  SUCCEEDS(wait_on(here(), id, ARRAY(F32, out, N)));
  for (int i = 0; i < 3; i++) { /* also once another request has its place */
    blank(out, ROOM);
    FAILS(wait_on(here(), first, ARRAY(F32, out, N)), FFI_FAILED_PRECONDITION, "jaxmpi.wait on rank 1 of 4",
          "waited for already", "once");
    CHECK(is_blank(out, 0, ROOM));
    SUCCEEDS(START("hold", ARRAY(F32, in, N), id, COMM(here())));
    CHECK(id[0] == first[0] && id[1] != first[1]);
    if (i == 1) FAILS(wait_on(here(), first, ARRAY(F32, out, N)), FFI_FAILED_PRECONDITION, "waited for already");
    SUCCEEDS(wait_on(here(), id, ARRAY(F32, out, N)));
  }
}

/* Which of two messages alike, or collectives, may be done first: any, unless they are of reverse mode. The second one
 * may block. */
TEST(adjoints_are_in_order) {
  enum { SEND, RECEIVE, REDUCE, BLOCKING_SEND, BLOCKING_RECEIVE, ALL_KINDS };
  for (derivative = 0; derivative < 4; derivative++)
    for (int alike = 0; alike < 2; alike++)
      for (int kind = 0; kind < ALL_KINDS; kind++) {
        const bool refused = (alike || kind == REDUCE) && derivative >= 2, blocks = kind > REDUCE;
        const bool receives = kind == RECEIVE || kind == BLOCKING_RECEIVE;
        const int tags[] = {OF_DERIVATIVES, OF_DERIVATIVES + !alike};
        float *ids[] = {id, other};
        context("derivative %d, alike %d, kind %d", (int)derivative, alike, kind);
        prepare();
        for (int i = 0; i < (blocks ? 1 : 2); i++) {
          int root = alike ? here()->rank : i;
          if (receives)
            SUCCEEDS(start_receive(ids[i], U8, 4, 2, tags[i]));
          else if (kind == REDUCE)
            SUCCEEDS(START("ireduce", ARRAY(U8, in, 4), ids[i], COMM(here()), reduction("SUM"), root));
          else
            SUCCEEDS(START("isend", ARRAY(U8, in, 4), ids[i], COMM(here()), 2, tags[i]));
        }
        for (int i = 0; receives && i < (blocks && refused ? 1 : 2); i++) deliver(2, tags[i], 4);
        struct array to = receives || kind == REDUCE ? ARRAY(U8, out, 4) : NONE;
        ffi_error *error = kind == BLOCKING_SEND      ? RUN("send", ARRAY(U8, in, 4), NONE, COMM(here()), 2, tags[1])
                           : kind == BLOCKING_RECEIVE ? RUN("recv", NONE, to, COMM(here()), 2, 0, tags[1])
                                                      : wait_on(here(), other, to);
        FAILS_IF(refused, error, FFI_FAILED_PRECONDITION, "in the order in which they were started");
        SUCCEEDS(wait_on(here(), id, to));
        check_after();
      }
  derivative = 0;
}

/* As by a jax.vmap of a predicate, both branches of which have started something. */
TEST(requests_that_were_mixed_are_refused) {
  SUCCEEDS(START("hold", ARRAY(U8, in, 4), id, COMM(here())));
  SUCCEEDS(START("hold", ARRAY(U8, in, 4), other, COMM(here())));
  float both[4] = {id[0], id[1], other[0], other[1]}, half[4] = {id[0], id[1], 0, 0};
  FAILS(RUN("wait", ARRAY(F32, both, 4), ARRAY(U8, out, 8), COMM(here()), 0), FFI_UNIMPLEMENTED, "several requests");
  FAILS(RUN("wait", ARRAY(F32, half, 4), ARRAY(U8, out, 8), COMM(here()), 1), FFI_UNIMPLEMENTED, "several requests");
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
}

TEST(zeros_are_nothing_where_that_is_allowed) {
  static float zeros[][2] = {{0, 0}, {-0.0f, 0}, {0, -0.0f}};
  for (int i = 0; i < 3; i++) {
    blank(out, ROOM);
    struct array numbers = ARRAY(F32, zeros[i], 2);
    FAILS(RUN("wait", numbers, ARRAY(F32, out, N), COMM(here()), 0), FFI_FAILED_PRECONDITION, "it was never started");
    CHECK(is_blank(out, 0, ROOM));
    SUCCEEDS(RUN("wait", numbers, ARRAY(F32, out, N), COMM(here()), 1));
    CHECK(is_zero(out, 0, 4 * N) && is_blank(out, 4 * N, ROOM));
    SUCCEEDS(RUN("wait", numbers, NONE, COMM(here()), 1));
  }
  CHECK_EQUAL(communications(), 0);
}

TEST(garbage_is_no_request) {
  SUCCEEDS(START("hold", ARRAY(F32, in, N), id, COMM(here())));
  for (int zero = 0; zero < 2; zero++)
    FOR_VALUES (float, number, NAN, -NAN, INFINITY, -INFINITY, -1, -0.5f, 0.5f, 1.5f, 1e30f, -1e30f, 2147483648.0f,
                4294967296.0f, 16777216, 1e-40f)
      for (int k = 0; k < 3; k++) {
        float wrong[2] = {k != 1 ? *number : id[0], k != 0 ? *number : id[1]};
        context("%g, %g", (double)wrong[0], (double)wrong[1]);
        FAILS(RUN("wait", ARRAY(F32, wrong, 2), ARRAY(F32, out, N), COMM(here()), zero), FFI_FAILED_PRECONDITION,
              "of another process");
        float near[2] = {id[0] + (k != 1), id[1] + (k != 0)};
        FAILS(wait_on(here(), near, ARRAY(F32, out, N)), FFI_FAILED_PRECONDITION, "of another process");
      }
  CHECK(is_blank(out, 0, ROOM));
  SUCCEEDS(wait_on(here(), id, ARRAY(F32, out, N)));
  CHECK_SAME(out, in, 4 * N);
}

TEST(numbers_have_a_shape) {
  static double eight[3] = {1, 1, 1};
  struct array wrong[] = {ARRAY(F64, eight, 2), ARRAY(S32, eight, 2), ARRAY(F32, eight, 1), ARRAY(F32, eight, 3)};
  FOR_EACH (const struct array *, shape, wrong) {
    FAILS(RUN("hold", ARRAY(F32, in, N), *shape, COMM(here())), FFI_INTERNAL, "reinstall");
    FAILS(RUN("irecv", NONE, *shape, COMM(here()), N, F32, 0, 0), FFI_INTERNAL, "reinstall");
    FAILS(RUN("wait", *shape, NONE, COMM(here()), 1), FFI_INTERNAL, "reinstall");
  }
  static int32_t nothing[2]; /* a constant of a derivative */
  SUCCEEDS(RUN("wait", ARRAY(S32, nothing, 2), NONE, COMM(here()), 1));
  FAILS(RUN("wait", ARRAY(S32, nothing, 2), NONE, COMM(here()), 0), FFI_INTERNAL, "reinstall");
  FAILS(RUN("ibarrier", NONE, MATRIX(F32, NULL, 0, 2), COMM(here())), FFI_UNIMPLEMENTED, "an axis of length 0");
  CHECK_EQUAL(communications(), 0);
}

/* --- several --- */

enum { SEVERAL = 5 };

static ffi_error *wait_on_several(float numbers[][2], int count, struct array results[], int result_count,
                                  int64_t zero) {
  struct array given[SEVERAL];
  for (int i = 0; i < count; i++) given[i] = ARRAY(F32, numbers[i], 2);
  return run_lists("wait", given, count, results, result_count, (const int64_t[]){COMM(here()), zero});
}

TEST(several_are_waited_for_at_once) {
  float ids[SEVERAL][2];
  struct array results[] = {ARRAY(F32, out, 2), ARRAY(U8, out + 16, 3), ARRAY(F64, out + 32, 1)};
  for (int failing = 0; failing < 2; failing++) {
    prepare();
    SUCCEEDS(START("hold", ARRAY(F32, in, 2), ids[0], COMM(here())));
    SUCCEEDS(START("isend", ARRAY(F32, in, 2), ids[1], COMM(here()), 2, 9));
    SUCCEEDS(start_receive(ids[2], U8, 3, 2, 5));
    SUCCEEDS(START("ibarrier", NONE, ids[3], COMM(here())));
    SUCCEEDS(START("iallreduce", ARRAY(F64, in, 1), ids[4], COMM(here()), reduction("SUM")));
    deliver(2, 5, failing ? 4 : 3);
    if (failing) fake->fail("MPI_Wait", 2, CODE);
    ffi_error *error = wait_on_several(ids, SEVERAL, results, 3, 0);
    FAILS_IF(failing, error, FFI_INVALID_ARGUMENT, "jaxmpi.irecv", "the template 3 bytes");
    CHECK_SAME(out, in, 8);
    if (!failing) CHECK_SAME(out + 16, message, 3);
    for (int i = 0; i < 8 && !failing; i++) CHECK_EQUAL(out[32 + i], (unsigned char)(in[i] + SIZE));
    check_after();
  }
}

TEST(some_of_several_are_nothing) {
  float ids[3][2] = {{0, 0}, {0, 0}, {0, 0}};
  struct array results[] = {ARRAY(F32, out, 2), ARRAY(F32, out + 16, 2)};
  SUCCEEDS(START("hold", ARRAY(F32, in, 2), ids[1], COMM(here())));
  SUCCEEDS(wait_on_several(ids, 3, results, 2, 1 + (2 << 0)));
  CHECK(is_zero(out, 0, 8));
  CHECK_SAME(out + 16, in, 8);
  SUCCEEDS(START("hold", ARRAY(F32, in, 2), ids[1], COMM(here())));
  SUCCEEDS(wait_on_several(ids, 3, results, 2, 1 + (2 << 2)));
  CHECK_SAME(out, in, 8);
  CHECK(is_zero(out, 16, 24) && is_blank(out, 24, ROOM));
  SUCCEEDS(START("hold", ARRAY(F32, in, 2), ids[1], COMM(here())));
  FAILS(wait_on_several(ids, 3, results, 1, 0), FFI_FAILED_PRECONDITION, "never started");
}

/* --- the order of messages --- */

TEST(a_blocking_receive_comes_after_those_that_are_expected) {
  for (int any = 0; any < 4; any++)
    for (int two = 0; two < 2; two++) { /* sendrecv */
      int source = any & 1 ? fake->any_source : 2, tag = any & 2 ? fake->any_tag : 5;
      prepare();
      SUCCEEDS(start_receive(id, U8, 4, source, tag));
      SUCCEEDS(start_receive(other, U8, 4, 3, 6));
      fake->deliver(here()->handle, 3, 6, message + 8, 4);
      fake->deliver(here()->handle, 2, 5, message, 4);
      fake->deliver(here()->handle, 2, 5, message + 4, 4);
      if (any == 3) fake->deliver(here()->handle, 3, 6, message + 12, 4);
      if (two)
        SUCCEEDS(RUN("sendrecv", ARRAY(U8, in, 4), ARRAY(U8, out, 4), COMM(here()), 0, tag, 5, source, 0));
      else
        SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), source, 0, tag));
      CHECK_SAME(out, message + (any == 3 ? 0 : 4), 4); /* what any may be, has been taken by the first already */
      wait_for_four(id, message + (any == 3 ? 8 : 0));
      if (any == 3) SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out + 4, 4), COMM(here()), 2, 0, 5));
      wait_for_four(other, message + (any == 3 ? 12 : 8));
      check_after();
    }
}

TEST(a_blocking_receive_from_nobody_is_not_delayed) {
  SUCCEEDS(start_receive(id, U8, 4, 2, 5));
  SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), fake->proc_null, 0, 5));
  CHECK(is_zero(out, 0, 4));
  deliver(2, 5, 4);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
}

/* Another thread, which takes the message of a plan; then one of users comes. */
static void *take_planned_soon(void *data) {
  usleep(20000);
  SUCCEEDS(RUN("recv", NONE, ARRAY(U8, data, 4), COMM(here()), 2, 0, TAGS));
  fake->deliver(here()->handle, 2, 0, message + 8, 4);
  return NULL;
}

TEST(any_tag_waits_for_users) {
  unsigned char got[4];
  pthread_t thread;
  fake->deliver(here()->handle, 2, TAGS, message, 4);
  SUCCEEDS(start_receive(id, U8, 4, fake->any_source, fake->any_tag)); /* the only one */
  if (pthread_create(&thread, NULL, take_planned_soon, got) != 0) abort();
  wait_for_four(id, message + 8);
  pthread_join(thread, NULL);
  CHECK_SAME(got, message, 4);
}

TEST(what_was_kept_comes_first) {
  SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag)); /* which finds the others */
  fake->deliver(here()->handle, 2, TAGS, message, 4);
  look_for_messages();
  CHECK_EQUAL(fake->queued, 0); /* it is kept */
  fake->deliver(here()->handle, 2, TAGS, message + 4, 4);
  for (int i = 0; i < 2; i++) {
    SUCCEEDS(start_receive(other, U8, 4, 2, TAGS));
    look_for_messages();
    wait_for_four(other, message + 4 * i);
  }
  deliver(2, 5, 4);
  wait_for_four(id, message);
}

TEST(any_tag_is_one_of_users) {
  static const int others[] = {TAGS, TAGS + 1, TAGS + 2, OF_DERIVATIVES, MOST_TAG};
  for (int alone = 0; alone < 2; alone++)
    FOR_EACH (const int *, tag, others) {
      context("tag %d, %s", *tag, alone ? "alone" : "with others");
      prepare();
      if (!alone) SUCCEEDS(start_receive(other, U8, 4, 0, 1));
      SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag));
      fake->deliver(here()->handle, 2, TAGS - 1, message, 4);
      fake->deliver(here()->handle, 2, *tag, message + 4, 4);
      wait_for_four(id, message);
      SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag)); /* which the other message is not for */
      look_for_messages();
      CHECK_EQUAL(fake->queued + fake->live_matched, 1); /* it is kept for another */
      SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), 2, 0, *tag));
      CHECK_SAME(out, message + 4, 4);
      fake->deliver(here()->handle, 2, 0, message + 8, 4);
      wait_for_four(id, message + 8);
      deliver(0, 1, 4);
      if (!alone) SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
      fake->reset();
      check_after();
    }
  prepare();
  runtime.most_tag = INT32_MAX; /* that of Open MPI */
  SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag));
  deliver(2, 1 << 29, 4);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
}

/* The derivative of sendrecv receives its message with ANY_TAG. */
TEST(a_blocking_receive_takes_any_tag_of_a_derivative) {
  SUCCEEDS(start_receive(id, U8, 4, 3, 1));
  deliver(2, OF_DERIVATIVES, 4);
  SUCCEEDS(RUN("sendrecv", ARRAY(U8, in, 4), ARRAY(U8, out, 4), COMM(here()), 0, fake->any_tag, OF_DERIVATIVES, 2, 0));
  CHECK_SAME(out, message, 4);
  deliver(3, 1, 4);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
}

/* --- what does not fit --- */

TEST(a_message_of_another_size_is_refused) {
  for (int when = 0; when < WHENS; when++)
    for (int alone = 0; alone < 2; alone++)
      for (int bytes = 0; bytes <= 8 * N; bytes += 3) {
        char sizes[64];
        snprintf(sizes, sizeof sizes, " %d bytes (%d elements of float32)", bytes, bytes / 4);
        context("%d bytes, time %d, %s", bytes, when, alone ? "alone" : "with others");
        prepare();
        if (!alone) SUCCEEDS(start_receive(other, U8, 4, 0, 1));
        if (when == BEFORE) deliver(2, 5, bytes);
        SUCCEEDS(start_receive(id, F32, N, 2, 5));
        if (when != BEFORE) deliver(2, 5, bytes);
        let_come(when);
        FAILS(wait_on(here(), id, ARRAY(F32, out, N)), FFI_INVALID_ARGUMENT, "jaxmpi.irecv on rank 1 of 4",
              "the message from rank 2 with tag 5 has", sizes, "the template 28 bytes",
              bytes > 4 * N ? "would be truncated" : "is too short", "dropped");
        CHECK(is_blank(out, 0, ROOM));
        SUCCEEDS(start_receive(id, F32, N, 2, 5)); /* the next one is not affected */
        deliver(2, 5, 4 * N);
        SUCCEEDS(wait_on(here(), id, ARRAY(F32, out, N)));
        CHECK_SAME(out, message, 4 * N);
        deliver(0, 1, 4);
        if (!alone) SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
        fake->reset();
        check_after();
      }
}

TEST(labels_go_along) {
  int64_t sites[] = {COMM(here()), 0, PLACE, 5};
  CHECK(call_site_add(ROW_isend, sites, F32, N, "a.py:3 (f)"));
  for (int when = THEN; when < WHENS; when++)
    for (const struct datatype *row = datatype_table; row->name != NULL; row++) {
      prepare();
      compare_on(here(), INT64_MAX, NULL);
      atomic_store(&runtime.labels, true);
      context("%s, time %d", row->name, when);
      SUCCEEDS(start_receive(id, row->code, N, PLACE, 5));
      SUCCEEDS(START("isend", ARRAY(row->code, in, N), other, COMM(here()), PLACE, 5));
      CHECK_EQUAL(called("MPI_Isend", 0)->in_bytes, sizeof(struct label) + N * row->bytes);
      if (when == FOUND) look_for_messages();
      SUCCEEDS(wait_on(here(), other, NONE));
      SUCCEEDS(wait_on(here(), id, ARRAY(row->code, out, N)));
      CHECK_SAME(out, in, N * row->bytes);
      CHECK(is_blank(out, N * row->bytes, ROOM));
      SUCCEEDS(start_receive(id, row->code, N, 2, 5));
      deliver(2, 5, (int64_t)(N * row->bytes)); /* of a rank that calls MPI itself */
      SUCCEEDS(wait_on(here(), id, ARRAY(row->code, out, N)));
      CHECK_SAME(out, message, N * row->bytes);

      int wrong = row->code == F32 ? S32 : F32;
      blank(out, ROOM);
      SUCCEEDS(start_receive(id, wrong, N, PLACE, 5));
      SUCCEEDS(START("isend", ARRAY(row->code, in, N), other, COMM(here()), PLACE, 5));
      if (when == FOUND) look_for_messages();
      FAILS(wait_on(here(), id, ARRAY(wrong, out, N)), FFI_INVALID_ARGUMENT, "is of 7 ", row->name, "the template of 7",
            row->code == F32 ? "called at a.py:3 (f)" : "");
      CHECK(is_blank(out, 0, ROOM));
      SUCCEEDS(wait_on(here(), other, NONE));
      check_after();
    }
}

/* --- batches --- */

TEST(a_request_of_one_is_waited_for_by_a_batch) {
  enum { BATCH = 3 };
  struct communicator *comm = world(1, 3);
  float ids[BATCH][2];
  for (int kind = 0; kind < 4; kind++) {
    int width = kind == 3 ? 6 : 2, rows = kind == 3 ? 3 : 1, each = width / rows;
    prepare();
    context("kind %d", kind);
    if (kind == 0) SUCCEEDS(START("hold", ARRAY(F32, in, width), ids[0], COMM(comm)));
    if (kind == 1) SUCCEEDS(START("iallreduce", ARRAY(F32, in, width), ids[0], COMM(comm), reduction("SUM")));
    if (kind == 2) SUCCEEDS(START("irecv", NONE, ids[0], COMM(comm), width, F32, 2, 5));
    if (kind == 3) SUCCEEDS(START("ialltoall", ARRAY(F32, in, width), ids[0], COMM(comm)));
    if (kind == 2) fake->deliver(comm->handle, 2, 5, message, 4 * width);
    for (int i = 1; i < BATCH; i++) memcpy(ids[i], ids[0], sizeof ids[0]);
    SUCCEEDS(RUN("wait", MATRIX(F32, ids, BATCH, 2), ARRAY(F32, out, BATCH * width), COMM(comm), 0));
    const unsigned char *right = kind == 2 ? message : in;
    for (int r = 0; r < rows; r++)
      for (int k = 0; k < BATCH; k++)
        for (int i = 0; i < 4 * each; i++)
          CHECK_EQUAL(out[(r * BATCH + k) * 4 * each + i],
                      (unsigned char)(right[r * 4 * each + i] + (kind == 1   ? 3
                                                                 : kind == 3 ? r - 1
                                                                             : 0)));
    CHECK(is_blank(out, (size_t)(BATCH * width * 4), ROOM));
    check_after();
  }
  prepare();
  SUCCEEDS(RUN("hold", ARRAY(F32, in, BATCH * 2), MATRIX(F32, ids, BATCH, 2), COMM(comm))); /* one of a batch */
  CHECK(ids[0][0] == ids[2][0] && ids[0][1] == ids[2][1]);
  SUCCEEDS(RUN("wait", MATRIX(F32, ids, BATCH, 2), ARRAY(F32, out, BATCH * 2), COMM(comm), 0));
  CHECK_SAME(out, in, BATCH * 8);
}

/* What has been begun is completed, and its message taken off the channel. */
TEST(another_batch_is_an_error) {
  for (int when = THEN; when < WHENS; when++) {
    prepare();
    SUCCEEDS(start_receive(id, F32, 4, 2, 5));
    deliver(2, 5, 16);
    let_come(when);
    FAILS(wait_on(here(), id, ARRAY(F32, out, 3)), FFI_UNIMPLEMENTED, "a result of 3 elements, of an array of 4",
          "jax.vmap");
    CHECK_EQUAL(fake->queued, 0);
    check_after();
  }
  fake->slow = 2;
  SUCCEEDS(START("iallreduce", ARRAY(F32, in, 4), id, COMM(here()), reduction("SUM")));
  FAILS(wait_on(here(), id, ARRAY(F64, out, 4)), FFI_UNIMPLEMENTED, "jax.vmap");
  SUCCEEDS(START("iallreduce", ARRAY(F32, in, 4), id, COMM(here()), reduction("SUM")));
  FAILS(wait_on(here(), id, NONE), FFI_UNIMPLEMENTED, "jax.vmap");
}

/* --- plans --- */

/* Rank 1 of 4 has twice `length` floats and two: the first `length` go to rank 2, the next two to rank 3; then come
 * `length` from rank 0 and two from rank 2. A message of LONG is announced. */
enum { SHORT = 2, LONG = NOTICE_BYTES / 4, MOST_FLOATS = 2 * LONG + 4, TWO = LABEL_BYTES + 8, SIGNATURE = 4711 };
static float a[MOST_FLOATS], a_out[MOST_FLOATS];
static int length;
static uint64_t number;

static int floats(void) { return 2 * length + 4; }

static const struct plan *planned(int64_t elements) {
  struct numbers n = {.count = 0};
  const int64_t bytes = 4 * length, message = LABEL_BYTES + bytes, sent = message + TWO;
  PUT(&n, SIGNATURE, 1, 0, 0, sent, sent, 2, 2, 2, 0, 2, 0, elements, elements);
  PUT(&n, 2, 0, message, 3, message, TWO);
  PUT(&n, 0, sent, message, 2, sent + message, TWO);
  PUT(&n, 0, LABEL_BYTES, 0, bytes, 0, 0, 0, 0, 0, message + LABEL_BYTES, bytes, 8, 0, 0, 0, 0);
  PUT(&n, 0, sent + LABEL_BYTES, bytes + 8, bytes, 0, 0, 0, 0);
  PUT(&n, 0, sent + message + LABEL_BYTES, 2 * bytes + 8, 8, 0, 0, 0, 0);
  const struct plan *plan = plan_make(n.values, n.count);
  CHECK(plan != NULL);
  return plan;
}

static const struct plan *the_plan(void) {
  static const struct plan *made[2];
  const struct plan **found = &made[length == LONG];
  if (*found == NULL) *found = planned(floats());
  return *found;
}

static void prepare_plan(int length_now) {
  prepare();
  length = length_now;
  number = atomic_load(&here()->planned) + 1;
  for (int i = 0; i < MOST_FLOATS; i++) a[i] = (float)(i + 1), a_out[i] = -1;
}

/* A message of `elements` floats, with a notice before it if it is a long one. */
static void deliver_planned(int source, uint64_t of_call, int elements) {
  static char data[8 * (LABEL_BYTES + 4 * LONG)];
  struct call call = {.operation = &operation_table[ROW_exchange_start]};
  const struct peer peer = {.bytes = LABEL_BYTES + 4 * elements};
  label_put(data, label_to(&peer, plan_label(&call, the_plan(), of_call)));
  for (int i = 0; i < elements; i++)
    memcpy(data + LABEL_BYTES + 4 * i, &(const float){(float)(1000 * source + i)}, sizeof(float));
  if (is_announced(&peer)) fake->deliver(here()->handle, source, notices_tag(), data, LABEL_BYTES);
  fake->deliver(here()->handle, source, is_announced(&peer) ? plans_tag() : notices_tag(), data, peer.bytes);
}

static void deliver_both(uint64_t of_call) {
  deliver_planned(0, of_call, length);
  deliver_planned(2, of_call, 2);
}

static ffi_error *start_exchange(float *numbers) {
  return START("exchange_start", ARRAY(F32, a, floats()), numbers, COMM(here()), COMM(the_plan()));
}

static ffi_error *finish_exchange(float *numbers, const struct plan *plan, int elements, int64_t zero) {
  struct array given[] = {ARRAY(F32, a, elements), ARRAY(F32, numbers, 2)};
  return run_lists("exchange_finish", given, 2, &ARRAY(F32, a_out, elements), 1,
                   (const int64_t[]){COMM(here()), COMM(plan), zero});
}

static ffi_error *finish(float *numbers) { return finish_exchange(numbers, the_plan(), floats(), 0); }

static void check_exchanged(bool zero) {
  for (int i = 0; i < floats(); i++) {
    int from_0 = i - length - 2, from_2 = i - 2 * length - 2;
    CHECK(a_out[i] == (float)(from_0 < 0 ? i + 1 : zero ? 0 : from_2 < 0 ? from_0 : 2000 + from_2));
  }
}

TEST(fields_are_exchanged) {
  FOR_VALUES (int, of, SHORT, LONG)
    for (int when = 0; when < WHENS; when++)
      for (int slow = 0; slow < 3; slow += 2) {
        const bool announced = *of == LONG;
        context("messages of %d, time %d, slow %d", *of, when, slow);
        prepare_plan(*of);
        fake->slow = slow;
        if (when == BEFORE) deliver_both(number);
        SUCCEEDS(start_exchange(id));
        CHECK_EQUAL(times_called("MPI_Isend"), 2 + announced);
        for (int i = 0; i < 3; i++) {
          const struct fake_call *sent = called("MPI_Isend", i - !announced);
          if (i == 0 && !announced) continue;
          CHECK_EQUAL(sent->peer, i == 2 ? 3 : 2);
          CHECK_EQUAL(sent->in_bytes, i == 0 ? LABEL_BYTES : i == 1 ? LABEL_BYTES + 4 * length : TWO);
          CHECK_EQUAL(sent->tag, i == 1 && announced ? plans_tag() : notices_tag());
        }
        if (when != BEFORE) deliver_both(number);
        let_come(when);
        SUCCEEDS(finish(id));
        check_exchanged(false);
        check_after();
        FAILS(finish(id), FFI_FAILED_PRECONDITION, "waited for already");
      }
  prepare_plan(SHORT);
  FAILS(finish((float[2]){0, 0}), FFI_FAILED_PRECONDITION, "never started");
  SUCCEEDS(finish_exchange((float[2]){0, 0}, the_plan(), floats(), 1));
  check_exchanged(true);
}

/* A result that boxes cover begins as what is there; without a request, or after an error, nothing of that is left. */
TEST(covered_results_are_written) {
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, 0, BEGINS_COVERED, TWO + 8, TWO, 1, 1, 2, 0, 2, 1, 4, 4);
  PUT(&n, 2, 0, TWO, 2, TWO + 8, TWO);
  PUT(&n, 0, LABEL_BYTES, 0, 8, 0, 0, 0, 0, 0, TWO, 8, 8, 0, 0, 0, 0);
  PUT(&n, 0, TWO + 8 + LABEL_BYTES, 8, 8, 0, 0, 0, 0, 0, TWO, 0, 8, 0, 0, 0, 0);
  const struct plan *covered = plan_make(n.values, n.count);
  CHECK(covered != NULL);
  for (int wrong = 0; wrong < 2; wrong++) {
    prepare_plan(SHORT);
    SUCCEEDS(START("exchange_start", ARRAY(F32, a, 4), id, COMM(here()), COMM(covered)));
    deliver_planned(2, number + (uint64_t)wrong, 2);
    ffi_error *error = finish_exchange(id, covered, 4, 0);
    FAILS_IF(wrong, error, FFI_FAILED_PRECONDITION, "rank 2 has sent something else");
    const float right[] = {3, 4, 2000, 2001};
    for (int i = 0; i < 4; i++) CHECK(wrong ? a_out[i] != a_out[i] : a_out[i] == right[i]);
    check_after();
  }
  prepare_plan(SHORT);
  SUCCEEDS(finish_exchange((float[2]){0, 0}, covered, 4, 1));
  for (int i = 0; i < 4; i++) CHECK(a_out[i] == 0);
}

/* Two at once, finished in the other order: the labels say that each has its own messages. */
TEST(two_exchanges_are_under_way) {
  prepare_plan(SHORT);
  SUCCEEDS(start_exchange(id));
  SUCCEEDS(start_exchange(other));
  for (uint64_t i = 0; i < 2; i++) deliver_both(number + i);
  SUCCEEDS(finish(other));
  check_exchanged(false);
  SUCCEEDS(finish(id));
  check_exchanged(false);
}

/* Also where it is short and a long one was expected, or the other way round. Then the next exchange is right. */
TEST(another_exchange_is_an_error) {
  FOR_VALUES (int, of, SHORT, LONG)
    for (int when = THEN; when < WHENS; when++) {
      const struct {
        int source, later, elements;
      } others[] = {{0, 1, *of}, {0, 0, *of + 1}, {0, 0, 2 * *of}, {0, 0, 1}, {0, 0, 3},
                    {2, 1, 2},   {2, -1, 2},      {2, 0, LONG},    {2, 0, 3}};
      for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
        const int source = others[k].source;
        char text[64];
        int length = snprintf(text, sizeof text, "rank %d has sent something else", source);
        if (others[k].elements != (source == 0 ? *of : 2))
          snprintf(text + length, sizeof text - (size_t)length, " (%d bytes", LABEL_BYTES + 4 * others[k].elements);
        context("messages of %d, time %d, case %d", *of, when, (int)k);
        prepare_plan(*of);
        SUCCEEDS(start_exchange(id));
        deliver_planned(source, number + (uint64_t)(int64_t)others[k].later, others[k].elements);
        deliver_planned(2 - source, number, source == 0 ? 2 : *of);
        let_come(when);
        FAILS(finish(id), FFI_FAILED_PRECONDITION, "jaxmpi.Grid.start", text);
        CHECK_EQUAL(fake->queued + queue_posted(), 0);
        for (int i = 0; i < floats(); i++) CHECK(a_out[i] == -1);
        SUCCEEDS(start_exchange(id));
        deliver_both(number + 1);
        SUCCEEDS(finish(id));
        check_exchanged(false);
        check_after();
      }
    }
}

/* Also then, what has been begun is completed. */
TEST(an_exchange_is_finished_as_it_was_started) {
  length = SHORT;
  const struct plan *smaller = planned(floats() - 1);
  for (int wrong = 0; wrong < 4; wrong++) {
    prepare_plan(SHORT);
    context("case %d", wrong);
    if (wrong < 3)
      SUCCEEDS(start_exchange(id));
    else
      SUCCEEDS(START("hold", ARRAY(F32, a, floats()), id, COMM(here())));
    deliver_both(number);
    if (wrong == 0) FAILS(finish_exchange(id, smaller, floats() - 1, 0), FFI_UNIMPLEMENTED, "jax.vmap");
    if (wrong == 1) FAILS(finish_exchange(id, the_plan(), floats() - 1, 0), FFI_INTERNAL, "reinstall");
    if (wrong == 2) FAILS(wait_on(here(), id, NONE), FFI_INTERNAL, "reinstall");
    if (wrong == 3) FAILS(finish(id), FFI_INTERNAL, "reinstall");
    CHECK_EQUAL(fake->queued, wrong == 3 ? 2 : 0);
    fake->reset();
    check_after();
  }
}

/* One rank may call what blocks where another starts: an exchange is the same with both. */
TEST(what_blocks_and_what_starts_are_one) {
  prepare_plan(LONG);
  deliver_both(number);
  SUCCEEDS(RUN("exchange", ARRAY(F32, a, floats()), ARRAY(F32, a_out, floats()), COMM(here()), COMM(the_plan())));
  check_exchanged(false);
}

/* --- errors of MPI --- */

/* Starts and waits; the error, if there is one. */
static const char *const kinds[] = {"iallreduce", "ireduce", "ialltoall", "ibarrier", "ibcast",
                                    "isend",      "irecv",   "recv",      "exchange", "long exchange"};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* What its errors call it. */
static const char *shown(const char *kind) {
  if (strcmp(kind, "ireduce") == 0) return "ibcast"; /* of which it is the adjoint */
  return strstr(kind, "exchange") != NULL ? "Grid.start" : strcmp(kind, "recv") == 0 ? "irecv" : kind;
}

static ffi_error *start_kind(int kind) {
  int64_t comm = COMM(here());
  struct array given = ARRAY(F32, in, 8);
  const char *name = kinds[kind];
  if (strstr(name, "exchange") != NULL) return start_exchange(id);
  if (strcmp(name, "iallreduce") == 0) return START(name, given, id, comm, reduction("SUM"));
  if (strcmp(name, "ireduce") == 0) return START(name, given, id, comm, reduction("SUM"), 2);
  if (strcmp(name, "ialltoall") == 0) return START(name, given, id, comm);
  if (strcmp(name, "ibarrier") == 0) return START(name, NONE, id, comm);
  if (strcmp(name, "ibcast") == 0) return START(name, given, id, comm, 8, F32, PLACE);
  if (strcmp(name, "isend") == 0) return START(name, given, id, comm, 2, 5);
  return start_receive(id, F32, 8, 2, strcmp(name, "recv") == 0 ? fake->any_tag : 5);
}

static ffi_error *finish_kind(int kind) {
  bool result = strcmp(kinds[kind], "isend") != 0 && strcmp(kinds[kind], "ibarrier") != 0;
  if (strstr(kinds[kind], "exchange") != NULL) return finish(id);
  return wait_on(here(), id, result ? ARRAY(F32, out, 8) : NONE);
}

/* Lets the nth call of a function fail; whether anything came of it. */
static bool fail_once(int kind, const char *function, int nth, int when, bool alone) {
  bool found = false, of_type = strncmp(function, "MPI_Type", 8) == 0;
  prepare_plan(strcmp(kinds[kind], "long exchange") == 0 ? LONG : SHORT);
  if (!alone) SUCCEEDS(start_receive(other, U8, 4, 0, 1));
  fake->slow = 2;
  fake->fail(function, nth, CODE);
  ffi_error *error = start_kind(kind);
  deliver(2, 5, 4 * 8);
  deliver_both(number);
  bool started = error == NULL;
  if (started && when == FOUND) look_for_messages();
  if (started) error = finish_kind(kind);
  if (error != NULL) {
    found = true;
    FAILS(error, FFI_INTERNAL, "jaxmpi.", shown(kinds[kind]), "on rank 1 of 4", "the fake's text for 77",
          of_type ? "" : function);
  }
  fake->fail("none", 1, CODE);
  deliver(0, 1, 4);
  if (!alone) SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
  check_after();
  if (started && !of_type && strstr(function, "probe") == NULL && strstr(kinds[kind], "exchange") != NULL)
    CHECK_EQUAL(fake->queued, 1 + alone); /* none of the plan's */
  fake->reset();
  return found;
}

/* Before the thread begins, which would look for messages, too. */
TEST_FIRST(each_error_is_told_and_leaves_nothing) {
  FOR_VALUES (string, function, "MPI_Iallreduce", "MPI_Ireduce", "MPI_Ialltoall", "MPI_Ibarrier", "MPI_Ibcast",
              "MPI_Isend", "MPI_Test", "MPI_Wait", "MPI_Improbe", "MPI_Iprobe", "MPI_Mprobe", "MPI_Mrecv", "MPI_Imrecv",
              "MPI_Type_contiguous", "MPI_Type_create_struct", "MPI_Type_commit") {
    int told = 0;
    for (int kind = 0; kind < KINDS; kind++)
      for (int limit = 0; limit < 2; limit++)
        for (int when = THEN; when <= FOUND; when++)
          for (int alone = 0; alone < 2; alone++)
            for (int nth = 1; nth <= 4; nth++) {
              context("%s, %s number %d, limit %d, time %d, alone %d", kinds[kind], *function, nth, limit, when, alone);
              runtime.max_count = limit ? 3 : INT32_MAX;
              bool expected = !alone && strcmp(*function, "MPI_Improbe") == 0; /* may hit the other one */
              if (!expected) told += fail_once(kind, *function, nth, when, alone);
            }
    context("%s", *function);
    CHECK(told > 0 || strcmp(*function, "MPI_Improbe") == 0);
  }
}

/* The search for messages fails for one that is expected: it is told there. */
TEST_FIRST(a_failing_search_is_told) {
  static const char *const functions[] = {"MPI_Improbe", "MPI_Iprobe"};
  for (int which = 0; which < 2; which++) {
    prepare();
    SUCCEEDS(start_receive(id, U8, 4, 2, which == 0 ? 5 : fake->any_tag));
    SUCCEEDS(start_receive(other, U8, 4, 3, 5));
    fake->fail(functions[which], 1, CODE);
    look_for_messages();
    deliver(2, 5, 4);
    FAILS(wait_on(here(), id, ARRAY(U8, out, 4)), FFI_INTERNAL, "jaxmpi.irecv", functions[which], "for 77", "source 2");
    deliver(3, 5, 4);
    SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
    CHECK_EQUAL(fake->queued, 1);
    SUCCEEDS(start_receive(other, U8, 4, 3, 5));
    FAILS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), SIZE, 0, 5), FFI_INTERNAL, "jaxmpi.recv",
          "MPI_Improbe failed", "source 4"); /* of a blocking one */
    deliver(3, 5, 4);
    SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
    fake->reset();
    check_after();
  }
}

/* What an error tells of the arguments is what was started, not the numbers of the request. */
TEST(an_error_of_a_wait_is_in_the_words_of_the_start) {
  SUCCEEDS(START("isend", ARRAY(F32, in, N), id, COMM(here()), 2, 9));
  fake->fail("MPI_Wait", 1, CODE);
  ffi_error *error = wait_on(here(), id, NONE);
  if (CHECK(error != NULL)) CHECK(strstr(error->text, "request") == NULL && strstr(error->text, "in ") == NULL);
  FAILS(error, FFI_INTERNAL, "jaxmpi.isend on rank 1 of 4: MPI_Wait failed: the fake's text for 77; dest 2; tag 9");
}

/* --- the thread --- */

/* Until `condition` holds, at most ten seconds. */
#define SOON(condition)                                           \
  do {                                                            \
    for (int i = 0; i < 10000 && !(condition); i++) usleep(1000); \
    CHECK(condition);                                             \
  } while (0)

TEST(what_is_long_is_looked_after) {
  enum { LONG = 1 << 16 };
  unsigned char *given = malloc(LONG), *got = malloc(LONG);
  if (given == NULL || got == NULL) abort();
  fill(given, LONG);
  prepare();
  fake->slow = 5;
  SUCCEEDS(START("isend", ARRAY(U8, given, LONG), id, COMM(here()), 2, 9));
  SOON(fake->live_requests == 0); /* it has been tested until it was done */
  SUCCEEDS(wait_on(here(), id, NONE));
  check_after();

  prepare();
  blank(got, LONG);
  SUCCEEDS(start_receive(id, U8, LONG, 2, 5));
  SUCCEEDS(start_receive(other, U8, LONG, 2, 5)); /* of which a short message comes */
  fake->deliver(here()->handle, 2, 5, given, LONG);
  deliver(2, 5, 4);
  SOON(fake->queued == 0 && fake->live_requests == 0);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, got, LONG)));
  CHECK_SAME(got, given, LONG);
  FAILS(wait_on(here(), other, ARRAY(U8, got, LONG)), FFI_INVALID_ARGUMENT, "is too short");
  check_after();

  prepare();
  fake->slow = 3;
  SUCCEEDS(START("iallreduce", ARRAY(U8, given, LONG), id, COMM(here()), reduction("SUM")));
  fake->fail("MPI_Test", 1, CODE); /* the error is told by the wait, and nothing is left under way */
  SOON(fake->call_count > 1);
  ffi_error *error = wait_on(here(), id, ARRAY(U8, got, LONG));
  if (error != NULL) FAILS(error, FFI_INTERNAL, "jaxmpi.iallreduce", "MPI_Test failed");
  check_after();
  free(given);
  free(got);
}

/* After an operation that blocks, and now and then. */
TEST(the_thread_looks_for_what_is_short) {
  for (int patient = 1; patient >= 0; patient--) {
    prepare();
    if (!patient) progress_patience = 1000000;
    SUCCEEDS(start_receive(id, U8, 4, 2, 5));
    if (patient) deliver(2, 5, 4);
    usleep(20000);
    if (patient) CHECK_EQUAL(fake->queued, 1); /* the thread is at rest */
    SUCCEEDS(RUN("barrier", NONE, NONE, COMM(here())));
    usleep(patient ? 0 : 50000);
    if (!patient) deliver(2, 5, 4);
    SOON(fake->queued == 0);
    wait_for_four(id, message);
  }
}

TEST(messages_are_not_expected_without_the_thread) {
  prepare_plan(SHORT);
  runtime.serialize = true;
  FAILS(start_receive(id, U8, 4, 2, 5), FFI_UNIMPLEMENTED, "jaxmpi.irecv", "MPI_THREAD_MULTIPLE", "Nothing was sent");
  FAILS(start_exchange(id), FFI_UNIMPLEMENTED, "jaxmpi.Grid.start", "MPI_THREAD_MULTIPLE");
  CHECK_EQUAL(communications(), 0);
  CHECK_EQUAL(atomic_load(&here()->planned), number - 1);
  fake->slow = 2;
  SUCCEEDS(START("isend", ARRAY(F32, in, N), id, COMM(here()), 2, 9)); /* what is sent needs none */
  SUCCEEDS(wait_on(here(), id, NONE));
  SUCCEEDS(START("iallreduce", ARRAY(F32, in, N), id, COMM(here()), reduction("SUM")));
  SUCCEEDS(wait_on(here(), id, ARRAY(F32, out, N)));
  if (CHECK_EQUAL(pthread_mutex_trylock(&runtime.lock), 0)) pthread_mutex_unlock(&runtime.lock);
}

/* --- communicators --- */

static void *free_soon(void *comm) {
  usleep(20000);
  fake->comm_free(((struct communicator *)comm)->handle);
  return NULL;
}

static struct communicator *new_communicator(void) {
  struct communicator *comm = NULL;
  CHECK_EQUAL(abi->communicator(fake->comm_new(PLACE, SIZE), NULL, &comm), 0);
  return comm;
}

/* What is in flight is completed all the same, except for messages that have not come. */
TEST(a_communicator_is_freed) {
  float come[2];
  struct communicator *comm = new_communicator();
  SUCCEEDS(START("irecv", NONE, come, COMM(comm), 4, U8, 2, 5));
  SUCCEEDS(START("irecv", NONE, id, COMM(comm), 4, U8, 2, 5));
  SUCCEEDS(START("isend", ARRAY(U8, in, 4), other, COMM(comm), 2, 5));
  fake->deliver(comm->handle, 2, 5, message, 4);
  look_for_messages();
  fake->comm_free(comm->handle);
  CHECK_EQUAL(queue_posted(), 0);
  FAILS(START("isend", ARRAY(U8, in, 4), (float[2]){0}, COMM(comm), 2, 5), FFI_FAILED_PRECONDITION, "has been freed");
  FAILS(wait_on(comm, id, ARRAY(U8, out, 4)), FFI_FAILED_PRECONDITION, "jaxmpi.irecv", "freed before the message came");
  SUCCEEDS(wait_on(comm, come, ARRAY(U8, out, 4)));
  CHECK_SAME(out, message, 4);
  SUCCEEDS(wait_on(comm, other, NONE));
}

/* No field may look received. */
TEST(a_communicator_is_freed_during_an_exchange) {
  FOR_VALUES (int, of, SHORT, LONG) {
    context("messages of %d", *of);
    prepare_plan(*of);
    struct communicator *comm = new_communicator();
    const int64_t attributes[] = {COMM(comm), COMM(the_plan()), 0};
    const struct array given[] = {ARRAY(F32, a, floats()), ARRAY(F32, id, 2)};
    SUCCEEDS(START("exchange_start", given[0], id, COMM(comm), COMM(the_plan())));
    fake->comm_free(comm->handle);
    FAILS(run_lists("exchange_finish", given, 2, &ARRAY(F32, a_out, floats()), 1, attributes), FFI_FAILED_PRECONDITION,
          "jaxmpi.Grid.start", "freed before the message came");
  }
}

TEST(a_communicator_is_freed_during_a_wait) {
  for (int blocking = 0; blocking < 2; blocking++) {
    prepare();
    pthread_t thread;
    struct communicator *comm = new_communicator();
    SUCCEEDS(start_receive(other, U8, 4, 3, 1));
    SUCCEEDS(START("irecv", NONE, id, COMM(comm), 4, U8, 2, 5));
    if (pthread_create(&thread, NULL, free_soon, comm) != 0) abort();
    if (blocking)
      FAILS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(comm), 2, 0, 5), FFI_FAILED_PRECONDITION, "has been freed");
    FAILS(wait_on(comm, id, ARRAY(U8, out, 4)), FFI_FAILED_PRECONDITION, "jaxmpi.irecv", "freed before the message");
    pthread_join(thread, NULL);
    deliver(3, 1, 4);
    SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
    check_after();
  }
}

/* After a process has died: nothing is in flight on it any more, and nothing is said of that at the end. What is on
 * other communicators is as before. It may be freed later. */
TEST(a_communicator_is_given_up) {
  float of_here[2];
  struct communicator *comm = new_communicator();
  SUCCEEDS(start_receive(of_here, U8, 4, 3, 1));
  SUCCEEDS(START("irecv", NONE, id, COMM(comm), 4, U8, 2, 5));
  SUCCEEDS(START("isend", ARRAY(U8, in, 4), other, COMM(comm), 2, 5));
  CHECK_EQUAL(requests_in_flight(), 3);
  CHECK_EQUAL(abi->give_up(comm), 2);
  CHECK_EQUAL(requests_in_flight(), 1);
  FAILS(START("isend", ARRAY(U8, in, 4), (float[2]){0}, COMM(comm), 2, 5), FFI_FAILED_PRECONDITION,
        "has been given up by jaxmpi.survive.recover");
  FAILS(wait_on(comm, id, ARRAY(U8, out, 4)), FFI_FAILED_PRECONDITION, "given up by jaxmpi.survive.recover");
  FAILS(wait_on(comm, other, NONE), FFI_FAILED_PRECONDITION, "given up by jaxmpi.survive.recover");
  CHECK_EQUAL(abi->give_up(comm), 0);
  fake->comm_free(comm->handle);
  deliver(3, 1, 4);
  SUCCEEDS(wait_on(here(), of_here, ARRAY(U8, out, 4)));
}

/* Nobody can wait for what a run has started before its error. */
TEST(after_an_error_messages_are_left_to_others) {
  run_number = 1;
  SUCCEEDS(start_receive(id, U8, 4, 2, 5));
  run_number = 2;
  SUCCEEDS(start_receive(other, U8, 4, 2, 6));
  run_number = 1;
  deliver(2, 7, 4);
  FAILS(RUN("recv", NONE, ARRAY(U8, out, 8), COMM(here()), 2, 0, 7), FFI_INVALID_ARGUMENT, "too short");
  CHECK_EQUAL(queue_posted(), 1); /* of the other run */
  deliver(2, 5, 4);
  SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), 2, 0, 5));
  CHECK_SAME(out, message, 4);
  deliver(2, 6, 4);
  SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
  FAILS(wait_on(here(), id, ARRAY(U8, out, 4)), FFI_FAILED_PRECONDITION, "waited for already");
  run_number = 0;
}

/* --- memory --- */

TEST(many_are_in_flight) {
  enum { MANY = 200 };
  static float ids[MANY][2];
  for (int round = 0; round < 20; round++) {
    for (int i = 0; i < MANY; i++) SUCCEEDS(START("hold", ARRAY(U8, in + i, i + 1), ids[i], COMM(here())));
    CHECK_EQUAL(requests_in_flight(), MANY);
    for (int k = 0; k < MANY; k++) {
      int i = (k * 37 + round) % MANY;
      CHECK(ids[i][0] <= 2 * MANY); /* places are used again */
      SUCCEEDS(wait_on(here(), ids[i], ARRAY(U8, out, i + 1)));
      CHECK_SAME(out, in + i, i + 1);
    }
    check_after();
  }
}

/* A failed start takes no place. */
TEST(failed_starts_keep_nothing) {
  SUCCEEDS(START("hold", ARRAY(U8, in, 4), id, COMM(here())));
  float first = id[0];
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  for (int i = 0; i < 1000; i++) {
    fake->fail("MPI_Isend", 1, CODE);
    FAILS(START("isend", ARRAY(U8, in, 4), id, COMM(here()), 2, 5), FFI_INTERNAL, "MPI_Isend failed");
  }
  SUCCEEDS(START("hold", ARRAY(U8, in, 4), id, COMM(here())));
  CHECK(id[0] == first);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
}

/* --- random sequences, with a model of them --- */

enum { STEPS = 20000, MOST = 24 };

struct known { /* a request, or a message that nobody has yet */
  float numbers[2];
  const char *operation;
  int source, tag, bytes; /* of a message */
  int message;            /* of a receive: which it gets; -1: none yet. Of a message: which it is */
  int count, seed;        /* of the array */
};
static struct known flying[MOST], queued[MOST];
static int flying_count, queued_count, last_message;

static void make_data(unsigned char *data, int seed, int bytes) {
  for (int i = 0; i < bytes; i++) data[i] = (unsigned char)(seed * 31 + i * 7 + seed / 200);
}

static bool model_fits(const struct known *receive, const struct known *sent) {
  return (receive->source == fake->any_source || receive->source == sent->source) &&
         (receive->tag == fake->any_tag || receive->tag == sent->tag);
}

/* A message goes to the first receive that it fits, or is queued. */
static void model_send(void) {
  struct known sent = {
      .source = (int)draw(SIZE), .tag = (int)draw(3), .bytes = (int)draw(3) + 3, .message = ++last_message};
  unsigned char data[8];
  if (queued_count == MOST) return;
  make_data(data, sent.message, sent.bytes);
  fake->deliver(here()->handle, sent.source, sent.tag, data, sent.bytes);
  for (int i = 0; i < flying_count; i++)
    if (strcmp(flying[i].operation, "irecv") == 0 && flying[i].message < 0 && model_fits(&flying[i], &sent)) {
      flying[i].message = sent.message, flying[i].bytes = sent.bytes;
      return;
    }
  queued[queued_count++] = sent;
}

/* A receive takes the first message that fits. */
static void model_receive(struct known *receive) {
  receive->source = once_in(3) ? fake->any_source : (int)draw(SIZE);
  receive->tag = once_in(3) ? fake->any_tag : (int)draw(3);
  receive->message = -1;
  for (int i = 0; i < queued_count; i++)
    if (model_fits(receive, &queued[i])) {
      receive->message = queued[i].message, receive->bytes = queued[i].bytes;
      memmove(&queued[i], &queued[i + 1], (size_t)(--queued_count - i) * sizeof *queued);
      return;
    }
}

static void check_received(ffi_error *error, const struct known *receive, const unsigned char *data) {
  unsigned char right[8];
  make_data(right, receive->message, receive->bytes);
  if (receive->bytes == 4) {
    SUCCEEDS(error);
    CHECK_SAME(data, right, 4);
  } else {
    FAILS(error, FFI_INVALID_ARGUMENT, "the template 4 bytes", receive->bytes > 4 ? "truncated" : "too short");
    CHECK(is_blank(data, 0, 4));
  }
}

static void random_start(void) {
  static const char *const operations[] = {"irecv",  "irecv", "irecv", "iallreduce",
                                           "ibcast", "hold",  "isend", "ibarrier"};
  struct known made = {.operation = operations[draw(8)], .count = (int)draw(40), .seed = (int)draw(1000)};
  int64_t comm = COMM(here());
  unsigned char data[64];
  if (flying_count == MOST) return;
  make_data(data, made.seed, made.count);
  struct array given = ARRAY(U8, data, made.count);
  fake->slow = (int)draw(4);
  if (strcmp(made.operation, "irecv") == 0) {
    model_receive(&made);
    SUCCEEDS(start_receive(made.numbers, U8, 4, made.source, made.tag));
  } else if (strcmp(made.operation, "iallreduce") == 0) {
    SUCCEEDS(START(made.operation, given, made.numbers, comm, reduction("SUM")));
  } else if (strcmp(made.operation, "ibcast") == 0) {
    SUCCEEDS(START(made.operation, NONE, made.numbers, comm, made.count, U8, 2));
  } else if (strcmp(made.operation, "isend") == 0) {
    SUCCEEDS(START(made.operation, given, made.numbers, comm, PLACE == 1 ? 3 : 0, 1));
  } else {
    bool barrier = strcmp(made.operation, "ibarrier") == 0;
    SUCCEEDS(START(made.operation, barrier ? NONE : given, made.numbers, comm));
  }
  flying[flying_count++] = made;
}

static void random_wait(void) {
  int i = flying_count > 0 ? (int)draw((uint32_t)flying_count) : -1;
  if (i < 0 || (strcmp(flying[i].operation, "irecv") == 0 && flying[i].message < 0)) return;
  struct known one = flying[i];
  memmove(&flying[i], &flying[i + 1], (size_t)(--flying_count - i) * sizeof *flying);
  unsigned char got[64], right[64];
  blank(got, sizeof got);
  if (strcmp(one.operation, "irecv") == 0) {
    check_received(wait_on(here(), one.numbers, ARRAY(U8, got, 4)), &one, got);
  } else if (strcmp(one.operation, "isend") == 0 || strcmp(one.operation, "ibarrier") == 0) {
    SUCCEEDS(wait_on(here(), one.numbers, NONE));
  } else {
    SUCCEEDS(wait_on(here(), one.numbers, ARRAY(U8, got, one.count)));
    make_data(right, one.seed, one.count);
    for (int k = 0; k < one.count; k++) {
      if (strcmp(one.operation, "iallreduce") == 0) right[k] = (unsigned char)(right[k] + SIZE);
      if (strcmp(one.operation, "ibcast") == 0) right[k] = fake_byte(2, k);
    }
    CHECK_SAME(got, right, one.count);
  }
  if (once_in(5)) FAILS(wait_on(here(), one.numbers, NONE), FFI_FAILED_PRECONDITION, "waited for already");
}

/* A blocking receive, if it need not wait. */
static void random_receive(void) {
  struct known one = {.operation = "recv"};
  unsigned char got[4];
  int before = queued_count;
  blank(got, sizeof got);
  model_receive(&one);
  if (queued_count == before) return;
  check_received(RUN("recv", NONE, ARRAY(U8, got, 4), COMM(here()), one.source, 0, one.tag), &one, got);
}

TEST(random_sequences_are_as_in_the_model) {
  for (int seed = 1; seed <= 5; seed++) {
    prepare();
    draw_state = (uint64_t)seed;
    for (int step = 0; step < STEPS; step++) {
      context("seed %d, step %d", seed, step);
      if (once_in(10)) fake->unheard = (int)draw(6);
      if (once_in(10)) look_for_messages();
      uint32_t what = draw(4);
      if (what == 0) model_send();
      if (what == 1) random_start();
      if (what == 2) random_wait();
      if (what == 3 && once_in(2)) random_receive();
      if (!CHECK_EQUAL(requests_in_flight(), flying_count)) return;
    }
    for (int i = 0; flying_count > 0 && i < 100000; i++) { /* the rest */
      model_send();
      random_wait();
      random_wait();
      random_receive();
      random_receive();
    }
    CHECK_EQUAL(flying_count, 0);
    check_after();
    fake->reset();
    queued_count = 0;
  }
}

/* --- the end --- */

static int64_t finish_caught(void) {
  catch_stderr();
  int64_t under_way = requests_finish();
  release_stderr();
  return under_way;
}

/* Starts a reduction by a function of the user's, which `tests` calls of MPI_Test find under way. */
static void start_users(float number[2], int tests) {
  int64_t op = reduction_of(fake->operation("SUM"), REDUCER_USER);
  fake->slow = tests;
  SUCCEEDS(START("iallreduce", ARRAY(F32, in, N), number, COMM(here()), op));
  fake->slow = 0;
}

/* The last test: the thread has ended then, and it is told once. */
TEST(what_was_never_waited_for_is_named) {
  enum { MANY = 13 };
  float ids[MANY][2], by_user[2];
  int64_t site[] = {COMM(here()), 0, 2, 9};
  CHECK(call_site_add(ROW_isend, site, F32, N, "b.py:4 (g)"));
  prepare();
  runtime.rank = 7; /* in COMM_WORLD */
  for (int i = 0; i < MANY; i++) SUCCEEDS(START("hold", ARRAY(F32, in, N), ids[i], COMM(here())));
  for (int i = 0; i < 2; i++) SUCCEEDS(wait_on(here(), ids[i], ARRAY(F32, out, N)));
  SUCCEEDS(START("isend", ARRAY(F32, in, N), ids[0], COMM(here()), 2, 9)); /* in the places of these two */
  SUCCEEDS(start_receive(ids[1], F32, 5, 2, 5));
  start_users(by_user, 5);
  CHECK_EQUAL(finish_caught(), 0); /* it has waited for that */
  CHECK(strstr(caught, "jaxmpi: rank 7 has never waited for isend of 7 float32, dest 2, tag 9") != NULL);
  CHECK(strstr(caught, ", called at b.py:4 (g)\n") != NULL);
  CHECK(strstr(caught, "jaxmpi: rank 7 has never waited for irecv of 5 float32, source 2, tag 5") != NULL);
  CHECK(strstr(caught, "jaxmpi: rank 7 has never waited for 4 more requests\n") != NULL);
  deliver(2, 5, 20);
  SUCCEEDS(wait_on(here(), ids[0], NONE));
  SUCCEEDS(wait_on(here(), ids[1], ARRAY(F32, out, 5)));
  SUCCEEDS(wait_on(here(), by_user, ARRAY(F32, out, N)));
  start_users(by_user, 1 << 30);
  CHECK_EQUAL(finish_caught(), 1); /* the second time it does not */
  CHECK_EQUAL(caught[0], '\0');
  SUCCEEDS(wait_on(here(), by_user, ARRAY(F32, out, N)));
  for (int i = 2; i < MANY; i++) SUCCEEDS(wait_on(here(), ids[i], ARRAY(F32, out, N)));
}
