/* recv and sendrecv: which message is received, its data, and what happens if it does not fit. */
#include "execute/compare.h"
#include "core/failure.h"
#include "observe/summary.h"
#include "harness.h"

enum { ROOM = 256, N = 7 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM], message[ROOM];

/* A status between guards. */
static _Alignas(16) unsigned char guarded[128];
static void *const status = guarded + 32;

void prepare(void) {
  fake->reset();
  fill(message, ROOM);
  fill(in, ROOM);
  blank(out, ROOM);
  blank(guarded, sizeof guarded);
}

static void check_status(int source, int tag, int64_t bytes) {
  int got_source, got_tag;
  int64_t got_bytes;
  fake->status(status, &got_source, &got_tag, &got_bytes);
  CHECK_EQUAL(got_source, source);
  CHECK_EQUAL(got_tag, tag);
  CHECK_EQUAL(got_bytes, bytes);
  CHECK(is_blank(guarded, 0, 32) && is_blank(guarded, 32 + fake->status_bytes, sizeof guarded));
}

/* The road of an int's count and that of derived types. */
static void at_each_limit(void (*test)(void)) {
  FOR_VALUES (int, limit, 1 << 30, 3, 1) {
    runtime.max_count = *limit;
    context("at most %d in one call", *limit);
    prepare();
    test();
  }
}

static ffi_error *receive(int dtype, int count, int source, int tag, void *wanted) {
  return RUN("recv", NONE, ARRAY(dtype, out, count), COMM(world(1, 4)), source, COMM(wanted), tag);
}

static void deliver(int source, int tag, int64_t bytes) {
  fake->deliver(world(1, 4)->handle, source, tag, message, bytes);
}

/* The same for a message of a pytree. */
static ffi_error *receive_leaf(enum leaf place, int count, int tag) {
  leaf = place;
  ffi_error *error = receive(F32, count, 2, tag, NULL);
  leaf = LEAF_ALONE;
  return error;
}

/* --- what fits --- */

TEST_THROUGH(at_each_limit, a_message_that_fits_arrives, void) {
  for (const struct datatype *row = datatype_table; row->name != NULL; row++)
    for (int with = 0; with < 2; with++) {
      size_t bytes = N * row->bytes;
      prepare();
      deliver(2, 9, (int64_t)bytes);
      SUCCEEDS(receive(row->code, N, 2, 9, with ? status : NULL));
      CHECK_SAME(out, message, bytes);
      CHECK(is_blank(out, bytes, ROOM));
      if (with) check_status(2, 9, (int64_t)bytes);
      CHECK(with || is_blank(guarded, 0, sizeof guarded));
      const struct fake_call *call = called("MPI_Mrecv", 0);
      CHECK(call->out == out);
      CHECK_EQUAL(call->out_bytes, bytes);
      CHECK_EQUAL(times_called("MPI_Mrecv"), 1);
      if (N > runtime.max_count) continue;
      CHECK_EQUAL(call->out_count, N);
      CHECK_EQUAL(call->out_type, datatype(row->code));
    }
}

TEST(source_and_tag_choose) {
  fake->deliver(world(1, 4)->handle, 0, 5, message, 4);
  fake->deliver(world(1, 4)->handle, 2, 5, message + 4, 4);
  fake->deliver(world(1, 4)->handle, 2, 6, message + 8, 4);
  fake->deliver(world(1, 4)->handle, 2, 6, message + 12, 4);
  fake->deliver(world(0, 2)->handle, 1, 6, message + 16, 4);
  struct {
    int source, tag, at, found_source, found_tag;
  } cases[] = {{2, 6, 8, 2, 6},
               {2, fake->any_tag, 4, 2, 5},
               {fake->any_source, 6, 12, 2, 6},
               {fake->any_source, fake->any_tag, 0, 0, 5}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    context("case %zu", i);
    SUCCEEDS(receive(F32, 1, cases[i].source, cases[i].tag, status));
    check_envelope(called("MPI_Mprobe", (int)i), cases[i].source, cases[i].tag);
    CHECK_SAME(out, message + cases[i].at, 4);
    check_status(cases[i].found_source, cases[i].found_tag, 4);
  }
  CHECK_EQUAL(fake->queued, 1);
  FAILS(receive(F32, 1, fake->any_source, fake->any_tag, NULL), FFI_INTERNAL, "for 41"); /* another communicator's */
  SUCCEEDS(RUN("recv", NONE, ARRAY(F32, out, 1), COMM(world(0, 2)), 1, 0, 6));
  CHECK_SAME(out, message + 16, 4);
}

TEST_THROUGH(at_each_limit, nobody_sends_zeros, void) {
  for (int count = 0; count <= N; count += N)
    for (int with = 0; with < 2; with++) {
      prepare();
      SUCCEEDS(receive(F32, count, fake->proc_null, 3, with ? status : NULL));
      CHECK(is_zero(out, 0, (size_t)count * 4) && is_blank(out, (size_t)count * 4, ROOM));
      if (with) check_status(fake->proc_null, fake->any_tag, 0);
    }
}

TEST_THROUGH(at_each_limit, an_empty_message_fills_an_empty_result, void) {
  deliver(3, 1, 0);
  SUCCEEDS(RUN("recv", NONE, ARRAY(F64, NULL, 0), COMM(world(1, 4)), 3, COMM(status), 1));
  check_status(3, 1, 0);
}

/* --- what does not fit --- */

/* The message behind one that was refused is received as ever. */
static void check_channel(void) {
  CHECK_EQUAL(fake->live_matched, 0);
  CHECK_EQUAL(fake->live_types, 0);
  fake->deliver(world(1, 4)->handle, 2, 9, in, 4 * N);
  SUCCEEDS(receive(F32, N, 2, 9, NULL));
  CHECK_SAME(out, in, 4 * N);
}

/* Of any rank, with any tag, where there is a status. */
static ffi_error *receive_other(int dtype, int count, int64_t bytes, bool with) {
  prepare();
  deliver(2, 9, bytes);
  return receive(dtype, count, with ? fake->any_source : 2, with ? fake->any_tag : 9, with ? status : NULL);
}
#define REFUSED(dtype, count, bytes, with, ...)                                                                     \
  FAILS(receive_other(dtype, count, bytes, with), FFI_INVALID_ARGUMENT, "jaxmpi.recv on rank 1 of 4: the message ", \
        "from rank 2 with tag 9 has ", "dropped", __VA_ARGS__);                                                     \
  CHECK(is_blank(out, 0, ROOM));                                                                                    \
  check_channel()

TEST_THROUGH(at_each_limit, what_does_not_fit_is_refused, void) {
  for (int with = 0; with < 2; with++) {
    REFUSED(F32, N, 32, with, "32 bytes (8 elements of float32), the template 28 bytes (7 elements)", "truncated");
    REFUSED(F32, N, 29, with, "29 bytes (7 elements of float32), the template 28 bytes (7 elements)", "truncated");
    REFUSED(F32, N, 56, with, "56 bytes (14 elements of float32), the template 28 bytes (7 elements)", "truncated");
    REFUSED(F32, 0, 1, with, "1 bytes", "the template 0 bytes", "would be truncated");
  }
  for (int bytes = 0; bytes < 4 * N; bytes++) {
    char text[64];
    snprintf(text, sizeof text, " %d bytes (%d elements of float32)", bytes, bytes / 4);
    REFUSED(F32, N, bytes, false, text, "the template 28 bytes", "is too short", "pass status=");
  }
  for (int bytes = 1; bytes < 8 * N; bytes += 3) /* half an element, also with a status */
    if (bytes % 8 != 0) {
      REFUSED(F64, N, bytes, true, "is too short");
    }
}

TEST_THROUGH(at_each_limit, a_short_message_with_status_leaves_zeros, void) {
  for (size_t count = 0; count < N; count++) {
    prepare();
    deliver(2, 9, (int64_t)(8 * count));
    SUCCEEDS(receive(F64, N, 2, 9, status));
    CHECK_SAME(out, message, 8 * count);
    CHECK(is_zero(out, 8 * count, 8 * N) && is_blank(out, 8 * N, ROOM));
    check_status(2, 9, (int64_t)(8 * count));
    check_channel();
  }
}

TEST_THROUGH(at_each_limit, the_last_of_a_pytree_tells_what_did_not_fit, void) {
  for (int errors = 0; errors < 8; errors++) {
    context("errors %d, at most %d in one call", errors, (int)runtime.max_count);
    prepare();
    for (int i = 0; i < 3; i++) {
      bool wrong = (errors >> i & 1) != 0, others = i < 2;
      blank(out, ROOM);
      deliver(2, 9, 4 * N + 4 * (i + 1) * wrong);
      ffi_error *error = receive_leaf((enum leaf)(LEAF_FIRST + i), N, 9);
      char text[32];
      snprintf(text, sizeof text, "has %d bytes", 4 * N + 4 * ((errors & 1) != 0 ? 1 : (errors & 2) != 0 ? 2 : 3));
      FAILS_IF(!others && errors != 0, error, FFI_INVALID_ARGUMENT, "jaxmpi.recv on rank 1 of 4", text, "dropped");
      if (wrong) CHECK(others ? is_spoilt(out, 4 * N) : is_blank(out, 0, ROOM));
      if (!wrong) CHECK_SAME(out, message, 4 * N);
      check_channel(); /* what is alone has nothing to do with it */
      deliver(2, 8, 4 * N);
      SUCCEEDS(receive_leaf(LEAF_LAST, N, 8)); /* nor has another pytree */
    }
    CHECK_EQUAL(atomic_load(&failures_kept), 0);
  }
}

TEST(what_was_kept_ends_with_its_pytree) {
  deliver(2, 9, 4 * N + 4);
  SUCCEEDS(receive_leaf(LEAF_FIRST, N, 9)); /* and its program ends */
  deliver(2, 9, 4 * N);
  SUCCEEDS(receive_leaf(LEAF_FIRST, N, 9));
  deliver(2, 9, 4 * N);
  SUCCEEDS(receive_leaf(LEAF_LAST, N, 9));
  CHECK_EQUAL(atomic_load(&failures_kept), 0);
}

TEST(a_failure_of_mpi_is_told_at_once) {
  deliver(2, 9, 4 * N + 4);
  fake->fail("MPI_Mrecv", 1, 77);
  FAILS(receive_leaf(LEAF_FIRST, N, 9), FFI_INTERNAL, "for 77");
  CHECK_EQUAL(atomic_load(&failures_kept), 0);
}

/* --- sendrecv --- */

static ffi_error *exchange(struct array a, struct array b, int source, int dest, void *wanted) {
  return RUN("sendrecv", a, b, COMM(world(1, 4)), dest, 9, 5, source, COMM(wanted)); /* recvtag 9, sendtag 5 */
}

TEST_THROUGH(at_each_limit, sendrecv_sends_and_receives, void) {
  for (const struct datatype *row = datatype_table; row->name != NULL; row++)
    for (int sent = 0; sent <= N; sent += N) {
      size_t bytes = 5 * row->bytes;
      prepare();
      deliver(3, 9, (int64_t)bytes);
      SUCCEEDS(exchange(ARRAY(row->code, in, sent), ARRAY(row->code, out, 5), 3, 0, status));
      const struct fake_call *call = called("MPI_Isend", 0);
      CHECK(call->in == in && call->comm == world(1, 4)->handle);
      CHECK_EQUAL(call->in_bytes, (size_t)sent * row->bytes);
      check_envelope(call, 0, 5);
      check_envelope(called("MPI_Mprobe", 0), 3, 9);
      CHECK_SAME(out, message, bytes);
      CHECK(is_blank(out, bytes, ROOM));
      check_status(3, 9, (int64_t)bytes);
      CHECK_EQUAL(times_called("MPI_Wait"), 1);
      CHECK_EQUAL(fake->live_requests, 0);
    }
}

/* What is sent and what is received may be of two types; each is measured in its own. */
TEST_THROUGH(at_each_limit, sendrecv_of_two_types, void) {
  static const int types[][2] = {{U8, F64}, {F64, U8}, {F32, S16}, {BOOL, C128}, {C128, BF16}};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    int sent = types[i][0], received = types[i][1];
    size_t bytes = N * datatype_find(received)->bytes;
    prepare();
    deliver(2, 9, (int64_t)bytes);
    SUCCEEDS(exchange(ARRAY(sent, in, 3), ARRAY(received, out, N), 2, 0, NULL));
    CHECK_EQUAL(called("MPI_Isend", 0)->in_bytes, 3 * datatype_find(sent)->bytes);
    CHECK_EQUAL(called("MPI_Mrecv", 0)->out_bytes, bytes);
    CHECK(called("MPI_Isend", 0)->in_type == datatype(sent) || runtime.max_count < 3);
    CHECK(called("MPI_Mrecv", 0)->out_type == datatype(received) || runtime.max_count < N);
    CHECK_SAME(out, message, bytes);
    CHECK(is_blank(out, bytes, ROOM));

    prepare(); /* the rest of a short one, and a long one */
    deliver(2, 9, (int64_t)(bytes - datatype_find(received)->bytes));
    SUCCEEDS(exchange(ARRAY(sent, in, 3), ARRAY(received, out, N), 2, 0, status));
    CHECK(is_zero(out, bytes - datatype_find(received)->bytes, bytes) && is_blank(out, bytes, ROOM));
    deliver(2, 9, (int64_t)bytes + 1);
    FAILS(exchange(ARRAY(sent, in, 3), ARRAY(received, out, N), 2, 0, NULL), FFI_INVALID_ARGUMENT,
          datatype_find(received)->name, "truncated");
  }
}

TEST_THROUGH(at_each_limit, sendrecv_with_nobody, void) {
  SUCCEEDS(exchange(ARRAY(F32, in, N), ARRAY(F32, out, N), fake->proc_null, fake->proc_null, status));
  CHECK(is_zero(out, 0, 4 * N) && is_blank(out, 4 * N, ROOM));
  check_status(fake->proc_null, fake->any_tag, 0);
  CHECK_EQUAL(called("MPI_Isend", 0)->peer, fake->proc_null);

  prepare(); /* the ends of a chain */
  deliver(2, 9, 4 * N);
  SUCCEEDS(exchange(ARRAY(F32, in, N), ARRAY(F32, out, N), 2, fake->proc_null, NULL));
  CHECK_SAME(out, message, 4 * N);
  SUCCEEDS(exchange(ARRAY(F32, in, N), ARRAY(F32, out, N), fake->proc_null, 2, NULL));
  CHECK_EQUAL(called("MPI_Isend", 1)->peer, 2);
  CHECK(is_zero(out, 0, 4 * N));
}

TEST_THROUGH(at_each_limit, sendrecv_refuses_what_does_not_fit, void) {
  for (int bytes = 4 * N - 4; bytes <= 4 * N + 4; bytes += 8) {
    prepare();
    deliver(2, 9, bytes);
    FAILS(exchange(ARRAY(F32, in, 2), ARRAY(F32, out, N), 2, 0, NULL), FFI_INVALID_ARGUMENT,
          "jaxmpi.sendrecv on rank 1 of 4", "from rank 2 with tag 9", "the template 28 bytes");
    CHECK(is_blank(out, 0, ROOM));
    CHECK_EQUAL(times_called("MPI_Wait"), 1); /* this rank's own message arrives all the same */
    CHECK_EQUAL(fake->live_requests, 0);
    check_channel();
  }
}

/* The type to receive a message is made before the message is matched: an error between the two would lose it. */
TEST(a_message_is_not_lost_by_an_error) {
  runtime.max_count = 3;
  prepare();
  fake->deliver(world(0, 2)->handle, 1, 9, message, N * sizeof(float));
  FOR_VALUES (string, function, "MPI_Type_contiguous", "MPI_Type_create_struct", "MPI_Type_commit") {
    context("%s", *function);
    fake->fail(*function, 1, 77);
    FAILS(RUN("recv", NONE, ARRAY(F32, out, N), COMM(world(0, 2)), 1, 0, 9), FFI_INTERNAL, "for 77");
  }
  SUCCEEDS(RUN("recv", NONE, ARRAY(F32, out, N), COMM(world(0, 2)), 1, 0, 9));
}

/* --- labels, with JAXMPI_CHECK --- */

enum { ITSELF = 1, LABEL = sizeof(struct label) };

static void send_to_itself(int dtype, int count, int tag) {
  SUCCEEDS(RUN("send", ARRAY(dtype, in, count), NONE, COMM(world(1, 4)), ITSELF, tag));
}

static void prepare_labels(void) {
  prepare();
  compare_on(world(1, 4), INT64_MAX, NULL);
  atomic_store(&runtime.labels, true);
}

TEST_THROUGH(at_each_limit, a_labelled_message_arrives, void) {
  for (const struct datatype *row = datatype_table; row->name != NULL; row++)
    for (int count = 0; count <= N; count += N) {
      size_t bytes = (size_t)count * row->bytes;
      prepare_labels();
      send_to_itself(row->code, count, 9);
      CHECK_EQUAL(called("MPI_Send", 0)->in_bytes, LABEL + (int64_t)bytes);
      SUCCEEDS(receive(row->code, count, ITSELF, 9, status));
      CHECK_SAME(out, in, bytes);
      CHECK(is_blank(out, bytes, ROOM));
      check_status(ITSELF, 9, (int64_t)bytes);
      deliver(2, 9, (int64_t)bytes); /* one of a rank that calls MPI itself */
      SUCCEEDS(receive(row->code, count, 2, 9, NULL));
      CHECK_SAME(out, message, bytes);
      SUCCEEDS(RUN("sendrecv", ARRAY(row->code, in, count), ARRAY(row->code, out, count), COMM(world(1, 4)), ITSELF,
                   fake->any_tag, 3, ITSELF, 0));
      CHECK_SAME(out, in, bytes);
      CHECK_EQUAL(fake->live_types + fake->live_requests + fake->queued + fake->live_matched, 0);
    }
}

TEST(another_dtype_is_told) {
  int64_t sites[] = {COMM(world(1, 4)), ITSELF, 5}; /* comm, dest, tag */
  CHECK(call_site_add(ROW_send, sites, F32, N, "a.py:3 (f)"));
  for (int with = 0; with < 2; with++) {
    prepare_labels();
    send_to_itself(F32, N, 9);
    send_to_itself(F32, N, 5);
    send_to_itself(F32, 2, 6);
    FAILS(receive(S32, N, ITSELF, 9, with ? status : NULL), FFI_INVALID_ARGUMENT,
          "the message from rank 1 with tag 9 is of 7 float32, the template of 7 int32, so it was dropped.");
    FAILS(receive(F64, N, ITSELF, 5, with ? status : NULL), FFI_INVALID_ARGUMENT,
          "the message from rank 1 with tag 5 called at a.py:3 (f) is of 7 float32, the template of 7 float64");
    CHECK(is_blank(out, 0, ROOM));
    SUCCEEDS(receive(F32, 2, ITSELF, 6, NULL)); /* the next is not affected */
    CHECK_EQUAL(fake->queued + fake->live_matched, 0);
  }
}

TEST(labelled_sizes_are_compared) {
  prepare_labels();
  send_to_itself(F32, 3, 5);
  SUCCEEDS(receive(F32, N, ITSELF, 5, status));
  CHECK_SAME(out, in, 12);
  CHECK(((float *)(void *)out)[3] == 0 && ((float *)(void *)out)[N - 1] == 0);
  check_status(ITSELF, 5, 12);
  send_to_itself(F32, 3, 5);
  FAILS(receive(F32, N, ITSELF, 5, NULL), FFI_INVALID_ARGUMENT, "has 12 bytes (3 elements of float32)");
  send_to_itself(F32, N, 5);
  FAILS(receive(F32, 3, ITSELF, 5, status), FFI_INVALID_ARGUMENT, "it would be truncated, so it was dropped");
  prepare_labels();
  SUCCEEDS(receive(F32, N, fake->proc_null, 5, status));
  check_status(fake->proc_null, fake->any_tag, 0);
}

TEST(labelled_messages_can_fail) {
  prepare_labels();
  send_to_itself(F32, N, 5);
  fake->fail("MPI_Mrecv", 1, 77);
  FAILS(receive(F32, N, ITSELF, 5, NULL), FFI_INTERNAL, "for 77");
  fake->fail("MPI_Send", 1, 77);
  FAILS(RUN("send", ARRAY(F32, in, N), NONE, COMM(world(1, 4)), 2, 5), FFI_INTERNAL, "MPI_Send failed");
  fake->fail("MPI_Isend", 1, 77);
  FAILS(RUN("sendrecv", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(world(1, 4)), 2, 0, 0, 2, 0), FFI_INTERNAL,
        "for 77");
  CHECK_EQUAL(fake->live_types + fake->live_requests, 0);
}
