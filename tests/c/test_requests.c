/* Requests: what starts, what waits for it, and what happens meanwhile. */
#define _GNU_SOURCE

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/plan.h"
#include "execute/compare.h"
#include "harness.h"
#include "requests/progress.h"
#include "requests/table.h"

/* Tags below TAGS are those of users; with the limit MOST_TAG the next are those of notices and of plans. */
enum { PLACE = 1, SIZE = 4, N = 7, ROOM = 1024, CODE = 77, MOST_TAG = 127, TAGS = 61, OF_DERIVATIVES = 64 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM], message[ROOM];
static float id[2], other[2];

static void prepare(void) {
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

static void deliver(int source, int tag, int64_t bytes) { fake->deliver(here()->handle, source, tag, message, bytes); }

/* As another wait would, or the thread. */
static void look_for_messages(void) { queue_match(NULL, NULL, 0); }

/* Nothing is left in MPI, and nothing in flight. */
static bool all_is_done(void) {
  return CHECK_EQUAL(fake->live_requests, 0) && CHECK_EQUAL(fake->live_matched, 0) &&
         CHECK_EQUAL(fake->live_types, 0) && CHECK_EQUAL(requests_in_flight(), 0) && CHECK_EQUAL(queue_posted(), 0) &&
         CHECK_EQUAL(atomic_load(&here()->queued), 0);
}

/* --- each operation --- */

struct share {
  const struct communicator *comm;
  int rank, size, dtype, count;
  size_t bytes; /* of `count` elements */
};

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

/* For all places, types and counts; each alone, with a limit that divides it, and while a message is expected, so that
 * a wait may not leave all to MPI. */
static void for_all(void (*body)(const struct share *)) {
  static const struct {
    int rank, size;
  } places[] = {{0, 1}, {1, 2}, {0, 3}, {3, 4}};
  static const int counts[] = {0, 1, N};
  for (int way = 0; way < 4; way++)
    for (size_t k = 0; k < sizeof places / sizeof *places; k++)
      for (const struct datatype *row = datatype_table; row->name != NULL; row++)
        FOR_EACH (const int *, count, counts) {
          struct communicator *comm = world(places[k].rank, places[k].size);
          struct share share = {comm, comm->rank, comm->size, row->code, *count, (size_t)*count * row->bytes};
          context("rank %d of %d, %d of %s, way %d", comm->rank, comm->size, *count, row->name, way);
          prepare();
          runtime.max_count = way & 1 ? 3 : INT32_MAX;
          if (way & 2) SUCCEEDS(START("irecv", NONE, other, COMM(comm), 1, U8, 0, TAGS - 1));
          fake->slow = way & 2 ? 3 : 0;
          body(&share);
          fake->deliver(comm->handle, 0, TAGS - 1, message, 1);
          unsigned char byte;
          if (way & 2)
            SUCCEEDS(wait_on(comm, other, ARRAY(U8, &byte, 1)));
          else
            SUCCEEDS(RUN("recv", NONE, ARRAY(U8, &byte, 1), COMM(comm), 0, 0, TAGS - 1));
          CHECK_EQUAL(byte, message[0]);
          if (!all_is_done()) return;
        }
}

static void check_reduced(const struct share *s) {
  for (size_t i = 0; i < s->bytes; i++)
    if (!CHECK_EQUAL(out[i], (unsigned char)(in[i] + s->size))) return;
}

static int chunks_of(const struct share *s) { return runtime.max_count == 3 && s->count > 3 ? (s->count + 2) / 3 : 1; }

static void iallreduce_case(const struct share *s) {
  SUCCEEDS(START_OF("iallreduce", s, s->count, COMM(s->comm), reduction("SUM")));
  CHECK_EQUAL(times_called("MPI_Iallreduce"), chunks_of(s));
  CHECK_EQUAL(called("MPI_Iallreduce", 0)->op, operation_handle("SUM"));
  wait_for_all_of(s, s->count);
  check_reduced(s);
}
static void iallreduce_reduces(void) { for_all(iallreduce_case); }

static void ireduce_case(const struct share *s) {
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
static void ireduce_is_zero_elsewhere(void) { for_all(ireduce_case); }

static void ialltoall_case(const struct share *s) {
  SUCCEEDS(START_OF("ialltoall", s, s->size * s->count, COMM(s->comm)));
  wait_for_all_of(s, s->size * s->count);
  for (int r = 0; r < s->size; r++)
    for (size_t i = 0; i < s->bytes; i++) {
      size_t at = (size_t)r * s->bytes + i;
      if (!CHECK_EQUAL(out[at], (unsigned char)(in[at] + r - s->rank))) return;
    }
  CHECK_EQUAL(times_called("MPI_Ialltoall"), 1);
}
static void ialltoall_exchanges(void) { for_all(ialltoall_case); }

static void ibarrier_case(const struct share *s) {
  SUCCEEDS(START("ibarrier", NONE, id, COMM(s->comm)));
  CHECK_EQUAL(called("MPI_Ibarrier", 0)->comm, s->comm->handle);
  SUCCEEDS(wait_on(s->comm, id, NONE));
}
static void ibarrier_has_no_result(void) { for_all(ibarrier_case); }

static void ibcast_case(const struct share *s) {
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
static void ibcast_hands_out(void) { for_all(ibcast_case); }

static void hold_case(const struct share *s) {
  int before = communications();
  SUCCEEDS(START_OF("hold", s, s->count, COMM(s->comm)));
  wait_for_all_of(s, s->count);
  CHECK_SAME(out, in, s->bytes);
  CHECK_EQUAL(communications(), before);
}
static void hold_holds(void) { for_all(hold_case); }

static void isend_case(const struct share *s) {
  int dest = (s->rank + 1) % s->size;
  SUCCEEDS(START_OF("isend", s, s->count, COMM(s->comm), dest, 9));
  const struct fake_call *call = called("MPI_Isend", 0);
  CHECK_EQUAL(call->in_bytes, s->bytes);
  CHECK_EQUAL(call->peer, dest);
  CHECK_EQUAL(call->tag, 9);
  SUCCEEDS(wait_on(s->comm, id, NONE));
  if (dest != s->rank) return;
  SUCCEEDS(RUN("recv", NONE, ARRAY(s->dtype, out, s->count), COMM(s->comm), dest, 0, 9));
  CHECK_SAME(out, in, s->bytes);
}
static void isend_sends_a_copy(void) { for_all(isend_case); }

static void isend_to_nobody(void) {
  prepare();
  SUCCEEDS(START("isend", ARRAY(F32, in, N), id, COMM(here()), fake->proc_null, 3));
  SUCCEEDS(wait_on(here(), id, NONE));
  all_is_done();
}

/* When a message comes: before its receive starts, before the wait, found by another before the wait, or late. */
enum { BEFORE, THEN, FOUND, LATE, WHENS };

static void irecv_case(const struct share *s) {
  for (int when = 0; when < WHENS; when++) {
    blank(out, ROOM);
    if (when == BEFORE) fake->deliver(s->comm->handle, 0, 5, message, (int64_t)s->bytes);
    SUCCEEDS(START("irecv", NONE, id, COMM(s->comm), s->count, s->dtype, 0, 5));
    if (when != BEFORE) fake->deliver(s->comm->handle, 0, 5, message, (int64_t)s->bytes);
    if (when == LATE) fake->unheard = 5;
    if (when == FOUND) look_for_messages();
    CHECK_EQUAL(fake->queued, when != FOUND);
    CHECK_EQUAL(fake->live_requests, when == FOUND);
    wait_for_all_of(s, s->count);
    CHECK_SAME(out, message, s->bytes);
    fake->unheard = 0;
  }
}
static void irecv_receives(void) { for_all(irecv_case); }

static void irecv_from_nobody_is_zero(void) {
  prepare();
  SUCCEEDS(start_receive(id, F32, N, fake->proc_null, 3));
  CHECK_EQUAL(queue_posted(), 0);
  SUCCEEDS(wait_on(here(), id, ARRAY(F32, out, N)));
  CHECK(is_zero(out, 0, 4 * N) && is_blank(out, 4 * N, ROOM));
  all_is_done();
}

/* --- numbers --- */

static void a_second_wait_is_an_error(void) {
  prepare();
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
  all_is_done();
}

/* Which of two messages alike, or collectives, may be waited for first: any, unless they are of reverse mode. */
static void adjoints_are_waited_for_in_order(void) {
  for (derivative = 0; derivative < 4; derivative++)
    for (int alike = 0; alike < 2; alike++)
      for (int kind = 0; kind < 3; kind++) {
        bool refused = (alike || kind == 2) && derivative >= 2;
        context("derivative %d, alike %d, kind %d", (int)derivative, alike, kind);
        prepare();
        float *ids[] = {id, other};
        for (int i = 0; i < 2; i++) {
          int tag = OF_DERIVATIVES + (alike ? 0 : i), root = alike ? here()->rank : i;
          if (kind == 0) SUCCEEDS(START("isend", ARRAY(U8, in, 4), ids[i], COMM(here()), 2, tag));
          if (kind == 1) SUCCEEDS(start_receive(ids[i], U8, 4, 2, tag));
          if (kind == 2) SUCCEEDS(START("ireduce", ARRAY(U8, in, 4), ids[i], COMM(here()), reduction("SUM"), root));
          if (kind == 1) deliver(2, tag, 4);
        }
        struct array to = kind != 0 ? ARRAY(U8, out, 4) : NONE;
        ffi_error *error = wait_on(here(), other, to);
        if (refused)
          FAILS(error, FFI_FAILED_PRECONDITION, "in the order in which they were started");
        else
          SUCCEEDS(error);
        SUCCEEDS(wait_on(here(), id, to));
        all_is_done();
      }
  derivative = 0;
}

static void adjoints_that_block_are_in_order(void) {
  for (derivative = 0; derivative < 4; derivative++)
    for (int tag = OF_DERIVATIVES; tag < OF_DERIVATIVES + 2; tag++)
      for (int receives = 0; receives < 2; receives++) {
        bool refused = derivative >= 2 && tag == OF_DERIVATIVES;
        context("derivative %d, tag %d, receives %d", (int)derivative, tag, receives);
        prepare();
        if (receives)
          SUCCEEDS(start_receive(id, U8, 4, 2, OF_DERIVATIVES));
        else
          SUCCEEDS(START("isend", ARRAY(U8, in, 4), id, COMM(here()), 2, OF_DERIVATIVES));
        if (receives) deliver(2, OF_DERIVATIVES, 4);
        if (receives && !refused) deliver(2, tag, 4);
        ffi_error *error = receives ? RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), 2, 0, tag)
                                    : RUN("send", ARRAY(U8, in, 4), NONE, COMM(here()), 2, tag);
        if (refused)
          FAILS(error, FFI_FAILED_PRECONDITION, "in the order in which they were started");
        else
          SUCCEEDS(error);
        SUCCEEDS(wait_on(here(), id, receives ? ARRAY(U8, out, 4) : NONE));
        all_is_done();
      }
  derivative = 0;
}

/* As by a jax.vmap of a predicate, both branches of which have started something. */
static void requests_that_were_mixed_are_refused(void) {
  prepare();
  SUCCEEDS(START("hold", ARRAY(U8, in, 4), id, COMM(here())));
  SUCCEEDS(START("hold", ARRAY(U8, in, 4), other, COMM(here())));
  float both[4] = {id[0], id[1], other[0], other[1]}, half[4] = {id[0], id[1], 0, 0};
  FAILS(RUN("wait", ARRAY(F32, both, 4), ARRAY(U8, out, 8), COMM(here()), 0), FFI_UNIMPLEMENTED, "several requests");
  FAILS(RUN("wait", ARRAY(F32, half, 4), ARRAY(U8, out, 8), COMM(here()), 1), FFI_UNIMPLEMENTED, "several requests");
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
  all_is_done();
}

static void zeros_are_nothing_where_that_is_allowed(void) {
  static float zeros[][2] = {{0, 0}, {-0.0f, 0}, {0, -0.0f}};
  prepare();
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

static void garbage_is_no_request(void) {
  static const float garbage[] = {NAN,   -NAN,   INFINITY,      -INFINITY,     -1,       -0.5f, 0.5f, 1.5f,
                                  1e30f, -1e30f, 2147483648.0f, 4294967296.0f, 16777216, 1e-40f};
  prepare();
  SUCCEEDS(START("hold", ARRAY(F32, in, N), id, COMM(here())));
  for (int zero = 0; zero < 2; zero++)
    FOR_EACH (const float *, number, garbage)
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
  all_is_done();
}

static void numbers_have_a_shape(void) {
  static double eight[3] = {1, 1, 1};
  struct array wrong[] = {ARRAY(F64, eight, 2), ARRAY(S32, eight, 2), ARRAY(F32, eight, 1), ARRAY(F32, eight, 3)};
  prepare();
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
  all_is_done();
}

/* --- several --- */

enum { SEVERAL = 5 };

static ffi_error *wait_on_several(float numbers[][2], int count, struct array results[], int result_count,
                                  int64_t zero) {
  struct frame frame;
  struct array given[SEVERAL];
  for (int i = 0; i < count; i++) given[i] = ARRAY(F32, numbers[i], 2);
  frame_make_lists(&frame, "wait", given, count, results, result_count, (const int64_t[]){COMM(here()), zero});
  return frame_call(&frame, "wait");
}

static void several_are_waited_for_at_once(void) {
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
    if (failing)
      FAILS(error, FFI_INVALID_ARGUMENT, "jaxmpi.irecv", "the template 3 bytes"); /* the first; the others are done */
    else
      SUCCEEDS(error);
    CHECK_SAME(out, in, 8);
    if (!failing) CHECK_SAME(out + 16, message, 3);
    for (int i = 0; i < 8 && !failing; i++) CHECK_EQUAL(out[32 + i], (unsigned char)(in[i] + SIZE));
    all_is_done();
  }
}

static void some_of_several_are_nothing(void) {
  float ids[3][2] = {{0, 0}, {0, 0}, {0, 0}};
  struct array results[] = {ARRAY(F32, out, 2), ARRAY(F32, out + 16, 2)};
  prepare();
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
  all_is_done();
}

/* --- the order of messages --- */

static void receives_are_matched_in_the_order_of_their_starts(void) {
  for (int late = 0; late < 3; late++) {
    float ids[3][2];
    prepare();
    for (int i = 0; i < 3; i++) SUCCEEDS(start_receive(ids[i], U8, 4, 2, 5));
    for (int i = 0; i < 3; i++) fake->deliver(here()->handle, 2, 5, message + 4 * i, 4);
    fake->unheard = late;
    for (int i = 2; i >= 0; i--) {
      SUCCEEDS(wait_on(here(), ids[i], ARRAY(U8, out, 4)));
      CHECK_SAME(out, message + 4 * i, 4);
    }
    all_is_done();
  }
}

/* Both messages come between the search for the first receive and that for the second, which they fit as well. */
static void an_earlier_receive_has_the_earlier_message(void) {
  const struct {
    int source, tag, sources[2], tags[2]; /* of the first; the second has source 2 and tag 1 */
  } cases[] = {{2, fake->any_tag, {2, 2}, {0, 1}},
               {fake->any_source, 1, {0, 2}, {1, 1}},
               {fake->any_source, fake->any_tag, {3, 2}, {0, 1}}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    context("case %zu", i);
    prepare();
    SUCCEEDS(start_receive(id, U8, 4, cases[i].source, cases[i].tag));
    SUCCEEDS(start_receive(other, U8, 4, 2, 1));
    for (int k = 0; k < 2; k++)
      fake->deliver(here()->handle, cases[i].sources[k], cases[i].tags[k], message + 4 * k, 4);
    fake->unheard = 1;
    SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
    CHECK_SAME(out, message + 4, 4);
    SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
    CHECK_SAME(out, message, 4);
    all_is_done();
  }
}

static void a_blocking_receive_comes_after_those_that_are_expected(void) {
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
      SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
      CHECK_SAME(out, message + (any == 3 ? 8 : 0), 4);
      if (any == 3) SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out + 4, 4), COMM(here()), 2, 0, 5));
      SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
      CHECK_SAME(out, message + (any == 3 ? 12 : 8), 4);
      all_is_done();
    }
}

static void a_blocking_receive_from_nobody_is_not_delayed(void) {
  prepare();
  SUCCEEDS(start_receive(id, U8, 4, 2, 5));
  SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), fake->proc_null, 0, 5));
  CHECK(is_zero(out, 0, 4));
  deliver(2, 5, 4);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  all_is_done();
}

/* Another thread, which takes the message of a plan; then one of users comes. */
static void *take_planned_soon(void *data) {
  usleep(20000);
  SUCCEEDS(RUN("recv", NONE, ARRAY(U8, data, 4), COMM(here()), 2, 0, TAGS));
  fake->deliver(here()->handle, 2, 0, message + 8, 4);
  return NULL;
}

static void any_tag_waits_for_users(void) {
  unsigned char got[4];
  pthread_t thread;
  prepare();
  fake->deliver(here()->handle, 2, TAGS, message, 4);
  SUCCEEDS(start_receive(id, U8, 4, fake->any_source, fake->any_tag)); /* the only one */
  if (pthread_create(&thread, NULL, take_planned_soon, got) != 0) abort();
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  CHECK_SAME(out, message + 8, 4);
  pthread_join(thread, NULL);
  CHECK_SAME(got, message, 4);
  all_is_done();
}

static void what_was_kept_comes_first(void) {
  prepare();
  SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag)); /* which finds the others */
  fake->deliver(here()->handle, 2, TAGS, message, 4);
  look_for_messages();
  CHECK_EQUAL(fake->queued, 0); /* it is kept */
  fake->deliver(here()->handle, 2, TAGS, message + 4, 4);
  for (int i = 0; i < 2; i++) {
    SUCCEEDS(start_receive(other, U8, 4, 2, TAGS));
    look_for_messages();
    SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
    CHECK_SAME(out, message + 4 * i, 4);
  }
  deliver(2, 5, 4);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  CHECK_SAME(out, message, 4);
  all_is_done();
}

static void any_tag_is_one_of_users(void) {
  static const int others[] = {TAGS, TAGS + 1, TAGS + 2, OF_DERIVATIVES, MOST_TAG};
  for (int alone = 0; alone < 2; alone++)
    FOR_EACH (const int *, tag, others) {
      context("tag %d, %s", *tag, alone ? "alone" : "with others");
      prepare();
      if (!alone) SUCCEEDS(start_receive(other, U8, 4, 0, 1));
      SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag));
      fake->deliver(here()->handle, 2, TAGS - 1, message, 4);
      fake->deliver(here()->handle, 2, *tag, message + 4, 4);
      SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
      CHECK_SAME(out, message, 4);
      SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag)); /* which the other message is not for */
      look_for_messages();
      CHECK_EQUAL(fake->queued + fake->live_matched, 1); /* it is kept for another */
      SUCCEEDS(RUN("recv", NONE, ARRAY(U8, out, 4), COMM(here()), 2, 0, *tag));
      CHECK_SAME(out, message + 4, 4);
      fake->deliver(here()->handle, 2, 0, message + 8, 4);
      SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
      CHECK_SAME(out, message + 8, 4);
      deliver(0, 1, 4);
      if (!alone) SUCCEEDS(wait_on(here(), other, ARRAY(U8, out, 4)));
      fake->reset();
      all_is_done();
    }
  prepare();
  runtime.most_tag = INT32_MAX; /* that of Open MPI */
  SUCCEEDS(start_receive(id, U8, 4, 2, fake->any_tag));
  deliver(2, 1 << 29, 4);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  all_is_done();
}

/* The derivative of sendrecv receives its message with ANY_TAG. */
static void a_blocking_receive_takes_any_tag_of_a_derivative(void) {
  prepare();
  SUCCEEDS(start_receive(id, U8, 4, 3, 1));
  deliver(2, OF_DERIVATIVES, 4);
  SUCCEEDS(RUN("sendrecv", ARRAY(U8, in, 4), ARRAY(U8, out, 4), COMM(here()), 0, fake->any_tag, OF_DERIVATIVES, 2, 0));
  CHECK_SAME(out, message, 4);
  deliver(3, 1, 4);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  all_is_done();
}

/* --- what does not fit --- */

static void a_message_of_another_size_is_refused(void) {
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
        if (when == LATE) fake->unheard = 4;
        if (when == FOUND) look_for_messages();
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
        all_is_done();
      }
}

static void labels_go_along(void) {
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
      all_is_done();
    }
}

/* --- batches --- */

static void a_request_of_one_is_waited_for_by_a_batch(void) {
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
    all_is_done();
  }
  prepare();
  SUCCEEDS(RUN("hold", ARRAY(F32, in, BATCH * 2), MATRIX(F32, ids, BATCH, 2), COMM(comm))); /* one of a batch */
  CHECK(ids[0][0] == ids[2][0] && ids[0][1] == ids[2][1]);
  SUCCEEDS(RUN("wait", MATRIX(F32, ids, BATCH, 2), ARRAY(F32, out, BATCH * 2), COMM(comm), 0));
  CHECK_SAME(out, in, BATCH * 8);
  all_is_done();
}

/* What has been begun is completed, and its message taken off the channel. */
static void another_batch_is_an_error(void) {
  for (int when = THEN; when < WHENS; when++) {
    prepare();
    SUCCEEDS(start_receive(id, F32, 4, 2, 5));
    deliver(2, 5, 16);
    if (when == LATE) fake->unheard = 3;
    if (when == FOUND) look_for_messages();
    FAILS(wait_on(here(), id, ARRAY(F32, out, 3)), FFI_UNIMPLEMENTED, "a result of 3 elements, of an array of 4",
          "jax.vmap");
    CHECK_EQUAL(fake->queued, 0);
    all_is_done();
  }
  fake->slow = 2;
  SUCCEEDS(START("iallreduce", ARRAY(F32, in, 4), id, COMM(here()), reduction("SUM")));
  FAILS(wait_on(here(), id, ARRAY(F64, out, 4)), FFI_UNIMPLEMENTED, "jax.vmap");
  SUCCEEDS(START("iallreduce", ARRAY(F32, in, 4), id, COMM(here()), reduction("SUM")));
  FAILS(wait_on(here(), id, NONE), FFI_UNIMPLEMENTED, "jax.vmap");
  all_is_done();
}

/* --- plans --- */

/* Rank 1 of 4 has 8 floats: the first two go to rank 2, the next two to rank 3; from rank 0 come the fifth and sixth,
 * from rank 2 the others. */
enum { A = 8, MESSAGE = LABEL_BYTES + 8, SIGNATURE = 4711 };
static float a[A], a_out[A];
static uint64_t number;

static const struct plan *planned(int64_t elements) {
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, 0, 0, 2 * MESSAGE, 2 * MESSAGE, 2, 2, 2, 0, 2, 0, elements, elements);
  PUT(&n, 2, 0, MESSAGE, 3, MESSAGE, MESSAGE);
  PUT(&n, 0, 2 * MESSAGE, MESSAGE, 2, 3 * MESSAGE, MESSAGE);
  PUT(&n, 0, LABEL_BYTES, 0, 8, 0, 0, 0, 0, 0, MESSAGE + LABEL_BYTES, 8, 8, 0, 0, 0, 0);
  PUT(&n, 0, 2 * MESSAGE + LABEL_BYTES, 16, 8, 0, 0, 0, 0);
  PUT(&n, 0, 3 * MESSAGE + LABEL_BYTES, 24, 8, 0, 0, 0, 0);
  const struct plan *plan = plan_make(n.values, n.count);
  CHECK(plan != NULL);
  return plan;
}

static const struct plan *the_plan(void) {
  static const struct plan *made;
  if (made == NULL) made = planned(A);
  return made;
}

static void prepare_plan(void) {
  prepare();
  number = atomic_load(&here()->planned) + 1;
  for (int i = 0; i < A; i++) a[i] = (float)(i + 1), a_out[i] = -1;
}

static void deliver_planned(int source, uint64_t of_call, int64_t bytes) {
  char data[64] = {0};
  struct call call = {.operation = &operation_table[ROW_exchange_start]};
  const struct peer peer = {.bytes = MESSAGE};
  float values[2] = {(float)source + 0.25f, (float)source + 0.5f};
  label_put(data, label_to(&peer, plan_label(&call, the_plan(), of_call)));
  memcpy(data + LABEL_BYTES, values, sizeof values);
  fake->deliver(here()->handle, source, notices_tag(), data, bytes);
}

static ffi_error *start_exchange(float *numbers) {
  return START("exchange_start", ARRAY(F32, a, A), numbers, COMM(here()), COMM(the_plan()));
}

static ffi_error *finish_by(const struct plan *plan, struct array in, struct array out, float *numbers, int64_t zero) {
  struct frame frame;
  struct array given[] = {in, ARRAY(F32, numbers, 2)};
  frame_make_lists(&frame, "exchange_finish", given, 2, &out, 1, (const int64_t[]){COMM(here()), COMM(plan), zero});
  return frame_call(&frame, "exchange_finish");
}

static ffi_error *finish_exchange(float *numbers, const struct plan *plan, int elements, int64_t zero) {
  return finish_by(plan, ARRAY(F32, a, elements), ARRAY(F32, a_out, elements), numbers, zero);
}

static void check_exchanged(bool zero) {
  static const float come[] = {0.25f, 0.5f, 2.25f, 2.5f};
  for (int i = 0; i < A; i++) CHECK(a_out[i] == (i < 4 ? (float)(i + 1) : zero ? 0 : come[i - 4]));
}

static void fields_are_exchanged(void) {
  for (int when = 0; when < WHENS; when++)
    for (int slow = 0; slow < 3; slow += 2) {
      prepare_plan();
      fake->slow = slow;
      context("time %d, slow %d", when, slow);
      if (when == BEFORE) deliver_planned(0, number, MESSAGE), deliver_planned(2, number, MESSAGE);
      SUCCEEDS(start_exchange(id));
      CHECK_EQUAL(times_called("MPI_Isend"), 2);
      CHECK_EQUAL(called("MPI_Isend", 1)->peer, 3);
      CHECK_EQUAL(called("MPI_Isend", 1)->in_bytes, MESSAGE);
      CHECK_EQUAL(called("MPI_Isend", 1)->tag, notices_tag());
      if (when != BEFORE) deliver_planned(0, number, MESSAGE), deliver_planned(2, number, MESSAGE);
      if (when == LATE) fake->unheard = 5;
      if (when == FOUND) look_for_messages();
      SUCCEEDS(finish_exchange(id, the_plan(), A, 0));
      check_exchanged(false);
      all_is_done();
      FAILS(finish_exchange(id, the_plan(), A, 0), FFI_FAILED_PRECONDITION, "waited for already");
    }
  prepare_plan();
  FAILS(finish_exchange((float[2]){0, 0}, the_plan(), A, 0), FFI_FAILED_PRECONDITION, "never started");
  SUCCEEDS(finish_exchange((float[2]){0, 0}, the_plan(), A, 1));
  check_exchanged(true);
}

/* A result that boxes cover begins as what is there; without a request, or after an error, nothing of that is left. */
static void covered_results_are_written(void) {
  static const struct plan *covered;
  struct numbers n = {.count = 0};
  PUT(&n, SIGNATURE, 1, 0, BEGINS_COVERED, MESSAGE + 8, MESSAGE, 1, 1, 2, 0, 2, 1, 4, 4);
  PUT(&n, 2, 0, MESSAGE, 2, MESSAGE + 8, MESSAGE);
  PUT(&n, 0, LABEL_BYTES, 0, 8, 0, 0, 0, 0, 0, MESSAGE, 8, 8, 0, 0, 0, 0);
  PUT(&n, 0, MESSAGE + 8 + LABEL_BYTES, 8, 8, 0, 0, 0, 0, 0, MESSAGE, 0, 8, 0, 0, 0, 0);
  if (covered == NULL) covered = plan_make(n.values, n.count);
  CHECK(covered != NULL);
  for (int wrong = 0; wrong < 2; wrong++) {
    prepare_plan();
    SUCCEEDS(START("exchange_start", ARRAY(F32, a, 4), id, COMM(here()), COMM(covered)));
    deliver_planned(2, number + (uint64_t)wrong, MESSAGE);
    ffi_error *error = finish_exchange(id, covered, 4, 0);
    if (wrong)
      FAILS(error, FFI_FAILED_PRECONDITION, "rank 2 has sent something else");
    else
      SUCCEEDS(error);
    const float right[] = {3, 4, 2.25f, 2.5f};
    for (int i = 0; i < 4; i++) CHECK(wrong ? a_out[i] != a_out[i] : a_out[i] == right[i]);
    all_is_done();
  }
  prepare_plan();
  SUCCEEDS(finish_exchange((float[2]){0, 0}, covered, 4, 1));
  for (int i = 0; i < 4; i++) CHECK(a_out[i] == 0);
}

/* Two at once, finished in the other order: the labels say that each has its own messages. */
static void two_exchanges_are_under_way(void) {
  prepare_plan();
  SUCCEEDS(start_exchange(id));
  SUCCEEDS(start_exchange(other));
  for (uint64_t i = 0; i < 2; i++) deliver_planned(0, number + i, MESSAGE), deliver_planned(2, number + i, MESSAGE);
  SUCCEEDS(finish_exchange(other, the_plan(), A, 0));
  check_exchanged(false);
  SUCCEEDS(finish_exchange(id, the_plan(), A, 0));
  check_exchanged(false);
  all_is_done();
}

static void another_exchange_is_an_error(void) {
  for (int when = THEN; when < WHENS; when++)
    for (int wrong = 0; wrong < 4; wrong++) {
      prepare_plan();
      context("time %d, case %d", when, wrong);
      SUCCEEDS(start_exchange(id));
      deliver_planned(0, number + (wrong == 0), MESSAGE - (wrong == 1 ? 4 : 0));
      deliver_planned(2, number - (wrong == 2), MESSAGE + (wrong == 3 ? 4 : 0));
      if (when == LATE) fake->unheard = 3;
      if (when == FOUND) look_for_messages();
      FAILS(finish_exchange(id, the_plan(), A, 0), FFI_FAILED_PRECONDITION, "jaxmpi.Grid.start",
            wrong < 2 ? "rank 0 has sent something else" : "rank 2 has sent something else");
      CHECK_EQUAL(fake->queued, 0);
      for (int i = 0; i < A; i++) CHECK(a_out[i] == -1);
      all_is_done();
    }
}

/* Also then, what has been begun is completed. */
static void an_exchange_is_finished_as_it_was_started(void) {
  static const struct plan *smaller;
  if (smaller == NULL) smaller = planned(A - 1), COMM(smaller);
  for (int wrong = 0; wrong < 4; wrong++) {
    prepare_plan();
    context("case %d", wrong);
    if (wrong < 3)
      SUCCEEDS(start_exchange(id));
    else
      SUCCEEDS(START("hold", ARRAY(F32, a, A), id, COMM(here())));
    deliver_planned(0, number, MESSAGE), deliver_planned(2, number, MESSAGE);
    if (wrong == 0) FAILS(finish_exchange(id, smaller, A - 1, 0), FFI_UNIMPLEMENTED, "jax.vmap");
    if (wrong == 1) FAILS(finish_exchange(id, the_plan(), A - 1, 0), FFI_INTERNAL, "reinstall");
    if (wrong == 2) FAILS(wait_on(here(), id, NONE), FFI_INTERNAL, "reinstall");
    if (wrong == 3) FAILS(finish_exchange(id, the_plan(), A, 0), FFI_INTERNAL, "reinstall");
    CHECK_EQUAL(fake->queued, wrong == 3 ? 2 : 0);
    fake->reset();
    all_is_done();
  }
}

/* --- plans with long messages, which are announced --- */

/* Rank 1 of 4: the first LONG floats go to rank 2, the next two to rank 3; from rank 0 come LONG, from rank 2 the last
 * two.
 */
enum { LONG = NOTICE_BYTES / 4, OF_MESSAGE = LABEL_BYTES + 4 * LONG, OF_LONG = 2 * LONG + 4 };
static float given_long[OF_LONG], got_long[OF_LONG];

static const struct plan *long_plan(void) {
  static const struct plan *made;
  struct numbers n = {.count = 0};
  const int64_t sent = OF_MESSAGE + MESSAGE;
  PUT(&n, SIGNATURE, 1, 0, 0, sent, sent, 2, 2, 2, 0, 2, 0, OF_LONG, OF_LONG);
  PUT(&n, 2, 0, OF_MESSAGE, 3, OF_MESSAGE, MESSAGE);
  PUT(&n, 0, sent, OF_MESSAGE, 2, sent + OF_MESSAGE, MESSAGE);
  PUT(&n, 0, LABEL_BYTES, 0, 4 * LONG, 0, 0, 0, 0, 0, OF_MESSAGE + LABEL_BYTES, 4 * LONG, 8, 0, 0, 0, 0);
  PUT(&n, 0, sent + LABEL_BYTES, 4 * (LONG + 2), 4 * LONG, 0, 0, 0, 0);
  PUT(&n, 0, sent + OF_MESSAGE + LABEL_BYTES, 4 * (2 * LONG + 2), 8, 0, 0, 0, 0);
  if (made == NULL) made = plan_make(n.values, n.count);
  CHECK(made != NULL);
  return made;
}

static void prepare_long(void) {
  prepare();
  number = atomic_load(&here()->planned) + 1;
  for (int i = 0; i < OF_LONG; i++) given_long[i] = (float)(i + 1), got_long[i] = -1;
}

/* A message of `elements` floats, with a notice before it if it is a long one. */
static void deliver_any(int source, uint64_t of_call, int elements) {
  static char data[8 * OF_MESSAGE];
  struct call call = {.operation = &operation_table[ROW_exchange_start]};
  const struct peer peer = {.bytes = LABEL_BYTES + 4 * elements};
  label_put(data, label_to(&peer, plan_label(&call, long_plan(), of_call)));
  for (int i = 0; i < elements; i++)
    memcpy(data + LABEL_BYTES + 4 * i, &(const float){(float)(1000 * source + i)}, sizeof(float));
  if (is_announced(&peer)) fake->deliver(here()->handle, source, notices_tag(), data, LABEL_BYTES);
  fake->deliver(here()->handle, source, is_announced(&peer) ? plans_tag() : notices_tag(), data, peer.bytes);
}

static ffi_error *start_long(float *numbers) {
  return START("exchange_start", ARRAY(F32, given_long, OF_LONG), numbers, COMM(here()), COMM(long_plan()));
}

static ffi_error *finish_long(float *numbers) {
  return finish_by(long_plan(), ARRAY(F32, given_long, OF_LONG), ARRAY(F32, got_long, OF_LONG), numbers, 0);
}

static void check_long(void) {
  for (int i = 0; i < OF_LONG; i++) {
    int from_0 = i - LONG - 2, from_2 = i - 2 * LONG - 2;
    CHECK(got_long[i] == (float)(from_0 < 0 ? i + 1 : from_2 < 0 ? from_0 : 2000 + from_2));
  }
}

static void long_messages_are_exchanged(void) {
  for (int when = 0; when < WHENS; when++)
    for (int slow = 0; slow < 3; slow += 2) {
      prepare_long();
      fake->slow = slow;
      context("time %d, slow %d", when, slow);
      if (when == BEFORE) deliver_any(0, number, LONG), deliver_any(2, number, 2);
      SUCCEEDS(start_long(id));
      CHECK_EQUAL(times_called("MPI_Isend"), 3);
      static const int64_t bytes[] = {LABEL_BYTES, OF_MESSAGE, MESSAGE};
      for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(called("MPI_Isend", i)->in_bytes, bytes[i]);
        CHECK_EQUAL(called("MPI_Isend", i)->tag, i == 1 ? plans_tag() : notices_tag());
      }
      if (when != BEFORE) deliver_any(0, number, LONG), deliver_any(2, number, 2);
      if (when == LATE) fake->unheard = 5;
      if (when == FOUND) look_for_messages();
      SUCCEEDS(finish_long(id));
      check_long();
      all_is_done();
    }
}

/* Also where it is short and a long one was expected, or the other way round. Then the next exchange is right. */
static void another_long_message_is_an_error(void) {
  static const struct {
    int source, later, elements;
  } others[] = {{0, 1, LONG}, {0, 0, LONG + 1}, {0, 0, 2 * LONG}, {0, 0, 3}, {2, 0, LONG}, {2, 1, 2}, {2, 0, 3}};
  for (int when = THEN; when < WHENS; when++)
    for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
      const int source = others[k].source;
      char text[64];
      snprintf(text, sizeof text, "rank %d has sent something else (%d bytes", source,
               LABEL_BYTES + 4 * others[k].elements);
      prepare_long();
      context("time %d, case %d", when, (int)k);
      SUCCEEDS(start_long(id));
      deliver_any(source, number + (uint64_t)others[k].later, others[k].elements);
      deliver_any(2 - source, number, source == 0 ? 2 : LONG);
      if (when == LATE) fake->unheard = 3;
      if (when == FOUND) look_for_messages();
      FAILS(finish_long(id), FFI_FAILED_PRECONDITION, "jaxmpi.Grid.start", text);
      CHECK_EQUAL(fake->queued, 0);
      CHECK_EQUAL(queue_posted(), 0);
      for (int i = 0; i < OF_LONG; i++) CHECK(got_long[i] == -1);
      SUCCEEDS(start_long(id));
      deliver_any(0, number + 1, LONG), deliver_any(2, number + 1, 2);
      SUCCEEDS(finish_long(id));
      check_long();
      all_is_done();
    }
}

/* One rank may call what blocks where another starts: an exchange is the same with both. */
static void what_blocks_and_what_starts_are_one(void) {
  prepare_long();
  deliver_any(0, number, LONG), deliver_any(2, number, 2);
  SUCCEEDS(
      RUN("exchange", ARRAY(F32, given_long, OF_LONG), ARRAY(F32, got_long, OF_LONG), COMM(here()), COMM(long_plan())));
  check_long();
  CHECK_EQUAL(fake->queued, 0);
}

static void calls_of_long_messages_fail(void) {
  static const char *const functions[] = {"MPI_Isend", "MPI_Improbe", "MPI_Imrecv", "MPI_Mrecv", "MPI_Wait"};
  FOR_EACH (const char *const *, function, functions)
    for (int nth = 1; nth <= 3; nth++)
      for (int found = 0; found < 2; found++) {
        context("%s, call %d, found %d", *function, nth, found);
        prepare_long();
        fake->fail(*function, nth, CODE);
        ffi_error *error = start_long(id);
        deliver_any(0, number, LONG), deliver_any(2, number, 2);
        if (error == NULL && found) look_for_messages();
        if (error == NULL) error = finish_long(id);
        if (error != NULL)
          FAILS(error, FFI_INTERNAL, "jaxmpi.Grid.start", *function);
        else
          check_long();
        CHECK_EQUAL(queue_posted(), 0);
        all_is_done();
      }
}

/* --- errors of MPI --- */

/* Starts and waits; the error, if there is one. */
static const char *const kinds[] = {"iallreduce", "ireduce", "ialltoall", "ibarrier", "ibcast",
                                    "isend",      "irecv",   "recv",      "exchange"};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* What its errors call it. */
static const char *shown(const char *kind) {
  if (strcmp(kind, "ireduce") == 0) return "ibcast"; /* of which it is the adjoint */
  return strcmp(kind, "exchange") == 0 ? "Grid.start" : strcmp(kind, "recv") == 0 ? "irecv" : kind;
}

static ffi_error *start_kind(int kind) {
  int64_t comm = COMM(here());
  struct array given = ARRAY(F32, in, A);
  const char *name = kinds[kind];
  if (strcmp(name, "exchange") == 0) return start_exchange(id);
  if (strcmp(name, "iallreduce") == 0) return START(name, given, id, comm, reduction("SUM"));
  if (strcmp(name, "ireduce") == 0) return START(name, given, id, comm, reduction("SUM"), 2);
  if (strcmp(name, "ialltoall") == 0) return START(name, given, id, comm);
  if (strcmp(name, "ibarrier") == 0) return START(name, NONE, id, comm);
  if (strcmp(name, "ibcast") == 0) return START(name, given, id, comm, A, F32, PLACE);
  if (strcmp(name, "isend") == 0) return START(name, given, id, comm, 2, 5);
  return start_receive(id, F32, A, 2, strcmp(name, "recv") == 0 ? fake->any_tag : 5);
}

static ffi_error *finish_kind(int kind) {
  bool result = strcmp(kinds[kind], "isend") != 0 && strcmp(kinds[kind], "ibarrier") != 0;
  if (strcmp(kinds[kind], "exchange") == 0) return finish_exchange(id, the_plan(), A, 0);
  return wait_on(here(), id, result ? ARRAY(F32, out, A) : NONE);
}

/* Lets the nth call of a function fail; whether anything came of it. */
static bool fail_once(int kind, const char *function, int nth, int when, bool alone) {
  bool found = false, of_type = strncmp(function, "MPI_Type", 8) == 0;
  prepare_plan();
  if (!alone) SUCCEEDS(start_receive(other, U8, 4, 0, 1));
  fake->slow = 2;
  fake->fail(function, nth, CODE);
  ffi_error *error = start_kind(kind);
  deliver(2, 5, 4 * A);
  deliver_planned(0, number, MESSAGE), deliver_planned(2, number, MESSAGE);
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
  all_is_done();
  if (started && !of_type && strstr(function, "probe") == NULL && strcmp(kinds[kind], "exchange") == 0)
    CHECK_EQUAL(fake->queued, 1 + alone); /* none of the plan's */
  fake->reset();
  return found;
}

static void each_error_is_told_and_leaves_nothing(void) {
  static const char *const functions[] = {
      "MPI_Iallreduce", "MPI_Ireduce", "MPI_Ialltoall", "MPI_Ibarrier",        "MPI_Ibcast",
      "MPI_Isend",      "MPI_Test",    "MPI_Wait",      "MPI_Improbe",         "MPI_Iprobe",
      "MPI_Mprobe",     "MPI_Mrecv",   "MPI_Imrecv",    "MPI_Type_contiguous", "MPI_Type_create_struct",
      "MPI_Type_commit"};
  FOR_EACH (const char *const *, function, functions) {
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
static void a_failing_search_is_told(void) {
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
    all_is_done();
  }
}

/* What an error tells of the arguments is what was started, not the numbers of the request. */
static void an_error_of_a_wait_is_in_the_words_of_the_start(void) {
  prepare();
  SUCCEEDS(START("isend", ARRAY(F32, in, N), id, COMM(here()), 2, 9));
  fake->fail("MPI_Wait", 1, CODE);
  ffi_error *error = wait_on(here(), id, NONE);
  if (CHECK(error != NULL)) CHECK(strstr(error->text, "request") == NULL && strstr(error->text, "in ") == NULL);
  FAILS(error, FFI_INTERNAL, "jaxmpi.isend on rank 1 of 4: MPI_Wait failed: the fake's text for 77; dest 2; tag 9");
  all_is_done();
}

/* --- the thread --- */

/* Until `condition` holds, at most ten seconds. */
#define SOON(condition)                                           \
  do {                                                            \
    for (int i = 0; i < 10000 && !(condition); i++) usleep(1000); \
    CHECK(condition);                                             \
  } while (0)

static void what_is_long_is_looked_after(void) {
  enum { LONG = 1 << 16 };
  unsigned char *given = malloc(LONG), *got = malloc(LONG);
  if (given == NULL || got == NULL) abort();
  fill(given, LONG);
  prepare();
  fake->slow = 5;
  SUCCEEDS(START("isend", ARRAY(U8, given, LONG), id, COMM(here()), 2, 9));
  SOON(fake->live_requests == 0); /* it has been tested until it was done */
  SUCCEEDS(wait_on(here(), id, NONE));
  all_is_done();

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
  all_is_done();

  prepare();
  fake->slow = 3;
  SUCCEEDS(START("iallreduce", ARRAY(U8, given, LONG), id, COMM(here()), reduction("SUM")));
  fake->fail("MPI_Test", 1, CODE); /* the error is told by the wait, and nothing is left under way */
  SOON(fake->call_count > 1);
  ffi_error *error = wait_on(here(), id, ARRAY(U8, got, LONG));
  if (error != NULL) FAILS(error, FFI_INTERNAL, "jaxmpi.iallreduce", "MPI_Test failed");
  all_is_done();
  free(given);
  free(got);
}

static void a_blocking_operation_does_not_keep_messages_waiting(void) {
  prepare();
  SUCCEEDS(start_receive(id, U8, 4, 2, 5));
  deliver(2, 5, 4);
  usleep(20000);
  CHECK_EQUAL(fake->queued, 1); /* the thread is at rest */
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(here())));
  SOON(fake->queued == 0);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  CHECK_SAME(out, message, 4);
  all_is_done();
}

static void what_is_short_is_looked_for_now_and_then(void) {
  prepare();
  progress_patience = 1000000;
  SUCCEEDS(start_receive(id, U8, 4, 2, 5));
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(here()))); /* so that it knows */
  usleep(50000);
  deliver(2, 5, 4);
  SOON(fake->queued == 0);
  SUCCEEDS(wait_on(here(), id, ARRAY(U8, out, 4)));
  CHECK_SAME(out, message, 4);
  all_is_done();
}

static void messages_are_not_expected_without_the_thread(void) {
  prepare_plan();
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
  all_is_done();
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
static void a_communicator_is_freed(void) {
  float come[2];
  prepare();
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
  all_is_done();
}

static void a_communicator_is_freed_during_a_wait(void) {
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
    all_is_done();
  }
}

/* After a process has died: nothing is in flight on it any more, and nothing is said of that at the end. What is on
 * other communicators is as before. It may be freed later. */
static void a_communicator_is_given_up(void) {
  float of_here[2];
  prepare();
  struct communicator *comm = new_communicator();
  SUCCEEDS(start_receive(of_here, U8, 4, 3, 1));
  SUCCEEDS(START("irecv", NONE, id, COMM(comm), 4, U8, 2, 5));
  SUCCEEDS(START("isend", ARRAY(U8, in, 4), other, COMM(comm), 2, 5));
  CHECK_EQUAL(requests_in_flight(), 3);
  CHECK_EQUAL(abi->give_up(comm), 2);
  CHECK_EQUAL(requests_in_flight(), 1);
  FAILS(START("isend", ARRAY(U8, in, 4), (float[2]){0}, COMM(comm), 2, 5), FFI_FAILED_PRECONDITION,
        "has been given up by jaxmpi.recover");
  FAILS(wait_on(comm, id, ARRAY(U8, out, 4)), FFI_FAILED_PRECONDITION, "given up by jaxmpi.recover");
  FAILS(wait_on(comm, other, NONE), FFI_FAILED_PRECONDITION, "given up by jaxmpi.recover");
  CHECK_EQUAL(abi->give_up(comm), 0);
  fake->comm_free(comm->handle);
  deliver(3, 1, 4);
  SUCCEEDS(wait_on(here(), of_here, ARRAY(U8, out, 4)));
  all_is_done();
}

/* Nobody can wait for what a run has started before its error. */
static void after_an_error_messages_are_left_to_others(void) {
  prepare();
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
  all_is_done();
}

/* --- memory --- */

static void many_are_in_flight(void) {
  enum { MANY = 200 };
  static float ids[MANY][2];
  prepare();
  for (int round = 0; round < 20; round++) {
    for (int i = 0; i < MANY; i++) SUCCEEDS(START("hold", ARRAY(U8, in + i, i + 1), ids[i], COMM(here())));
    CHECK_EQUAL(requests_in_flight(), MANY);
    for (int k = 0; k < MANY; k++) {
      int i = (k * 37 + round) % MANY;
      CHECK(ids[i][0] <= 2 * MANY); /* places are used again */
      SUCCEEDS(wait_on(here(), ids[i], ARRAY(U8, out, i + 1)));
      CHECK_SAME(out, in + i, i + 1);
    }
    all_is_done();
  }
}

/* A failed start takes no place. */
static void failed_starts_keep_nothing(void) {
  prepare();
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
  all_is_done();
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

static void random_sequences_are_as_in_the_model(void) {
  for (int seed = 1; seed <= 5; seed++) {
    prepare();
    draw_state = (uint64_t)seed;
    for (int step = 0; step < STEPS; step++) {
      context("seed %d, step %d", seed, step);
      if (once_in(10)) fake->unheard = (int)draw(6);
      if (once_in(10)) look_for_messages();
      switch (draw(4)) {
        case 0:
          model_send();
          break;
        case 1:
          random_start();
          break;
        case 2:
          random_wait();
          break;
        default:
          if (once_in(2)) random_receive();
      }
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
    all_is_done();
    fake->reset();
    queued_count = 0;
  }
}

/* --- the end --- */

static char text[8192]; /* what requests_finish says */

static int64_t finish_caught(void) {
  FILE *caught = tmpfile();
  int usual = dup(STDERR_FILENO);
  fflush(stderr);
  if (caught == NULL || usual < 0 || dup2(fileno(caught), STDERR_FILENO) < 0) abort();
  int64_t under_way = requests_finish();
  fflush(stderr);
  dup2(usual, STDERR_FILENO);
  close(usual);
  rewind(caught);
  text[fread(text, 1, sizeof text - 1, caught)] = '\0';
  fclose(caught);
  context("%s", text);
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
static void what_was_never_waited_for_is_named(void) {
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
  CHECK(strstr(text, "jaxmpi: rank 7 has never waited for isend of 7 float32, dest 2, tag 9") != NULL);
  CHECK(strstr(text, ", called at b.py:4 (g)\n") != NULL);
  CHECK(strstr(text, "jaxmpi: rank 7 has never waited for irecv of 5 float32, source 2, tag 5") != NULL);
  CHECK(strstr(text, "jaxmpi: rank 7 has never waited for 4 more requests\n") != NULL);
  deliver(2, 5, 20);
  SUCCEEDS(wait_on(here(), ids[0], NONE));
  SUCCEEDS(wait_on(here(), ids[1], ARRAY(F32, out, 5)));
  SUCCEEDS(wait_on(here(), by_user, ARRAY(F32, out, N)));
  start_users(by_user, 1 << 30);
  CHECK_EQUAL(finish_caught(), 1); /* the second time it does not */
  CHECK_EQUAL(text[0], '\0');
  SUCCEEDS(wait_on(here(), by_user, ARRAY(F32, out, N)));
  for (int i = 2; i < MANY; i++) SUCCEEDS(wait_on(here(), ids[i], ARRAY(F32, out, N)));
  all_is_done();
}

static const struct test tests[] = {
    TEST(each_error_is_told_and_leaves_nothing), /* before the thread begins, which would look for messages, too */
    TEST(a_failing_search_is_told),
    TEST(iallreduce_reduces),
    TEST(ireduce_is_zero_elsewhere),
    TEST(ialltoall_exchanges),
    TEST(ibarrier_has_no_result),
    TEST(ibcast_hands_out),
    TEST(hold_holds),
    TEST(isend_sends_a_copy),
    TEST(isend_to_nobody),
    TEST(irecv_receives),
    TEST(irecv_from_nobody_is_zero),
    TEST(a_second_wait_is_an_error),
    TEST(adjoints_are_waited_for_in_order),
    TEST(adjoints_that_block_are_in_order),
    TEST(requests_that_were_mixed_are_refused),
    TEST(zeros_are_nothing_where_that_is_allowed),
    TEST(garbage_is_no_request),
    TEST(numbers_have_a_shape),
    TEST(several_are_waited_for_at_once),
    TEST(some_of_several_are_nothing),
    TEST(receives_are_matched_in_the_order_of_their_starts),
    TEST(an_earlier_receive_has_the_earlier_message),
    TEST(a_blocking_receive_comes_after_those_that_are_expected),
    TEST(a_blocking_receive_from_nobody_is_not_delayed),
    TEST(any_tag_is_one_of_users),
    TEST(what_was_kept_comes_first),
    TEST(any_tag_waits_for_users),
    TEST(a_blocking_receive_takes_any_tag_of_a_derivative),
    TEST(a_message_of_another_size_is_refused),
    TEST(labels_go_along),
    TEST(a_request_of_one_is_waited_for_by_a_batch),
    TEST(another_batch_is_an_error),
    TEST(fields_are_exchanged),
    TEST(covered_results_are_written),
    TEST(two_exchanges_are_under_way),
    TEST(another_exchange_is_an_error),
    TEST(an_exchange_is_finished_as_it_was_started),
    TEST(long_messages_are_exchanged),
    TEST(another_long_message_is_an_error),
    TEST(what_blocks_and_what_starts_are_one),
    TEST(calls_of_long_messages_fail),
    TEST(an_error_of_a_wait_is_in_the_words_of_the_start),
    TEST(what_is_long_is_looked_after),
    TEST(a_blocking_operation_does_not_keep_messages_waiting),
    TEST(what_is_short_is_looked_for_now_and_then),
    TEST(messages_are_not_expected_without_the_thread),
    TEST(a_communicator_is_freed),
    TEST(a_communicator_is_freed_during_a_wait),
    TEST(a_communicator_is_given_up),
    TEST(after_an_error_messages_are_left_to_others),
    TEST(many_are_in_flight),
    TEST(failed_starts_keep_nothing),
    TEST(random_sequences_are_as_in_the_model),
    TEST(what_was_never_waited_for_is_named),
};

MAIN(tests)
