/* More elements than an int holds: no count passed to MPI may be truncated.
 *
 * Tested in two ways: with a lowered limit, so that the code for large counts runs on real data; and with true counts,
 * on invalid pointers, with a library that touches no buffer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <sys/mman.h>

#include "harness.h"

enum { PLACE = 1, SIZE = 3, ROOM = 1024 };

/* Each operation where it moves most, and the function whose calls count. */
static const struct {
  const char *operation, *function;
  bool in_shares, out_shares; /* the buffer holds a share for each rank */
  bool reads, writes;         /* whether there is such a buffer */
  bool reduces;
  int64_t attributes[5]; /* behind the communicator; a reduction's handle is filled in */
} cases[] = {
    {"allgather", "MPI_Allgather", false, true, true, true, false, {0}},
    {"allreduce", "MPI_Allreduce", false, false, true, true, true, {0}},
    {"alltoall", "MPI_Alltoall", true, true, true, true, false, {0}},
    {"bcast", "MPI_Bcast", false, false, true, false, false, {PLACE}},
    {"bcast", "MPI_Bcast", false, false, false, true, false, {2}},
    {"gather", "MPI_Gather", false, true, true, true, false, {PLACE}},
    {"gather", "MPI_Gather", false, false, true, false, false, {2}},
    {"reduce", "MPI_Reduce", false, false, true, true, true, {0, PLACE}},
    {"reduce", "MPI_Reduce", false, false, true, false, true, {0, 2}},
    {"scan", "MPI_Scan", false, false, true, true, true, {0}},
    {"scatter", "MPI_Scatter", true, false, true, true, false, {PLACE}},
    {"scatter", "MPI_Scatter", false, false, false, true, false, {2}},
    {"send", "MPI_Send", false, false, true, false, false, {2, 9}},
    {"recv", "MPI_Mrecv", false, false, false, true, false, {2, 0, 9}},
    {"sendrecv", "MPI_Isend", false, false, true, true, false, {0, 9, 5, 2, 0}},
};
enum { CASES = sizeof cases / sizeof *cases };

static bool receives(size_t i) { return strstr(cases[i].operation, "recv") != NULL; }

static ffi_error *run_case(size_t i, int dtype, void *in, void *out, int64_t count) {
  int64_t attributes[6] = {COMM(world(PLACE, SIZE))};
  struct array one = ARRAY(dtype, in, count), all = MATRIX(dtype, in, SIZE, count);
  struct array result = ARRAY(dtype, out, count), results = MATRIX(dtype, out, SIZE, count);
  memcpy(attributes + 1, cases[i].attributes, sizeof cases[i].attributes);
  if (cases[i].reduces) attributes[1] = reduction("SUM");
  context("%s, case %zu, %lld elements of type %d", cases[i].operation, i, (long long)count, dtype);
  return run(cases[i].operation,
             !cases[i].reads      ? NONE
             : cases[i].in_shares ? all
                                  : one,
             !cases[i].writes      ? NONE
             : cases[i].out_shares ? results
                                   : result,
             attributes);
}

/* --- the limit lowered --- */

static _Alignas(16) unsigned char in[ROOM], out[ROOM], usual[ROOM], message[ROOM];

static void run_small(size_t i, int dtype, int64_t count, int64_t limit) {
  fake->reset();
  runtime.max_count = limit;
  fill(in, ROOM);
  blank(out, ROOM);
  fill(message, ROOM);
  if (receives(i))
    fake->deliver(world(PLACE, SIZE)->handle, 2, 9, message, count * (int64_t)datatype_find(dtype)->bytes);
  SUCCEEDS(run_case(i, dtype, in, out, count));
}

/* No count beyond the limit, and together all. */
static void check_counts(size_t i, int64_t count, int64_t bytes, int64_t limit) {
  int64_t read = 0, written = 0;
  int calls = times_called(cases[i].function);
  for (int k = 0; k < calls; k++) {
    const struct fake_call *call = called(cases[i].function, k);
    CHECK(call->in_count <= limit && call->out_count <= limit);
    read += call->in_bytes;
    written += call->out_bytes;
  }
  int64_t chunks = cases[i].reduces && count > 0 ? (count + limit - 1) / limit : 1;
  CHECK_EQUAL(calls, chunks);
  CHECK_EQUAL(read > written ? read : written, bytes);
}

static void a_lowered_limit_changes_no_result(void) {
  static const int dtypes[] = {U8, F32, C128};
  FOR_EACH (const int *, dtype, dtypes)
    for (size_t i = 0; i < CASES; i++)
      for (int64_t count = 0; count <= 10; count++) {
        run_small(i, *dtype, count, INT_MAX);
        memcpy(usual, out, ROOM);
        for (int64_t limit = 1; limit <= 10; limit++) {
          run_small(i, *dtype, count, limit);
          CHECK_SAME(out, usual, ROOM);
          check_counts(i, count, count * (int64_t)datatype_find(*dtype)->bytes, limit);
        }
      }
}

/* --- true counts --- */

/* Addresses that nobody may touch. */
static char *const nowhere_in = (char *)0x100000000000, *const nowhere_out = (char *)0x300000000000;

static const int64_t counts[] = {INT_MAX - 1ll,     INT_MAX,        INT_MAX + 1ll,  INT_MAX + 6ll, UINT_MAX - 1ll,
                                 2ll * INT_MAX + 1, UINT_MAX + 1ll, UINT_MAX + 8ll, 5ll * INT_MAX};

static void start_hollow(void) {
  fake->reset();
  runtime.unmarked = true;
  fake->hollow = true;
}

static void check_reduction(size_t i, int64_t count, int64_t size, bool in_place) {
  int64_t done = 0;
  for (int k = 0; k < times_called(cases[i].function); k++) {
    const struct fake_call *call = called(cases[i].function, k);
    int64_t pass = call->in_count;
    CHECK(pass > 0);
    CHECK(call->in == (in_place ? fake->in_place : nowhere_in + done * size));
    CHECK(!cases[i].writes || call->out == (in_place ? nowhere_in : nowhere_out) + done * size);
    CHECK_EQUAL(call->in_bytes, pass * size);
    done += pass;
  }
  CHECK_EQUAL(done, count);
  CHECK_EQUAL(times_called("MPI_Type_contiguous"), 0);
}

static void true_count(size_t i, const struct datatype *row, int64_t count) {
  int64_t size = (int64_t)row->bytes, bytes = count * size;
  start_hollow();
  if (receives(i)) fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, bytes);
  SUCCEEDS(run_case(i, row->code, nowhere_in, nowhere_out, count));
  if (cases[i].reduces) {
    check_reduction(i, count, size, false);
    return;
  }
  CHECK_EQUAL(times_called(cases[i].function), 1);
  const struct fake_call *call = called(cases[i].function, 0);
  bool sends = cases[i].reads, broadcast = strcmp(cases[i].operation, "bcast") == 0;
  if (sends || broadcast) CHECK_EQUAL(call->in_bytes, bytes);
  if (cases[i].writes && !broadcast && strcmp(cases[i].operation, "sendrecv") != 0) CHECK_EQUAL(call->out_bytes, bytes);
  if (strcmp(cases[i].operation, "sendrecv") == 0) CHECK_EQUAL(called("MPI_Mrecv", 0)->out_bytes, bytes);
  if (sends) CHECK(call->in == nowhere_in);
  CHECK_EQUAL(times_called("MPI_Type_commit"), count <= INT_MAX ? 0 : strcmp(cases[i].operation, "sendrecv") ? 1 : 2);
}

static void true_counts_are_not_cut(void) {
  for (size_t i = 0; i < CASES; i++)
    FOR_EACH (const int64_t *, count, counts)
      for (const struct datatype *row = datatype_table; row->name != NULL; row++) true_count(i, row, *count);
}

static void true_counts_in_place(void) {
  for (size_t i = 0; i < CASES; i++)
    FOR_EACH (const int64_t *, count, counts) {
      if (!cases[i].reduces || !cases[i].writes) continue;
      start_hollow();
      SUCCEEDS(run_case(i, F64, nowhere_in, nowhere_in, *count));
      check_reduction(i, *count, 8, true);
    }
}

/* --- receiving what does not fit --- */

static ffi_error *receive(int dtype, void *result, int64_t count, void *status) {
  return RUN("recv", NONE, ARRAY(dtype, result, count), COMM(world(PLACE, SIZE)), 2, COMM(status), 9);
}

/* A library older than MPI 3 cannot tell how long such a message is. */
static bool counts_beyond_int(void) {
  return dlsym(fake_library, "MPI_Get_elements_x") != NULL || dlsym(fake_library, "MPI_Get_count_c") != NULL;
}

static void a_huge_message_for_a_small_result_is_refused(void) {
  if (!counts_beyond_int()) return;
  start_hollow();
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, INT_MAX + 3ll);
  FAILS(receive(S16, nowhere_out, 5, NULL), FFI_INVALID_ARGUMENT,
        "2147483650 bytes (1073741825 elements of int16), the template 10 bytes (5 elements)", "truncated");
  CHECK_EQUAL(called("MPI_Mrecv", 0)->out_bytes, INT_MAX + 3ll); /* the whole of it is taken */
}

static void a_huge_message_longer_than_a_huge_result_is_refused(void) {
  if (!counts_beyond_int()) return;
  start_hollow();
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, INT_MAX + 7ll);
  FAILS(receive(U8, nowhere_out, INT_MAX + 6ll, NULL), FFI_INVALID_ARGUMENT,
        "2147483654 bytes (2147483654 elements of uint8), the template 2147483653 bytes", "truncated");
}

static void a_message_shorter_than_a_huge_result_is_refused(void) {
  static const int64_t sent[] = {0, 4, 4004};
  FOR_EACH (const int64_t *, bytes, sent) {
    start_hollow();
    fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, *bytes);
    FAILS(receive(F32, nowhere_out, INT_MAX + 6ll, NULL), FFI_INVALID_ARGUMENT,
          "the template 8589934612 bytes (2147483653 elements)", "is too short");
  }
}

/* The rest of a huge result is found and zeroed: memory that is there once it is touched, the last bytes of it set. */
static void the_rest_of_a_huge_result_is_zero(void) {
  unsigned char status[64];
  int64_t count = INT_MAX + 6ll, arrived = count - 3;
  if (!counts_beyond_int()) return;
  unsigned char *room =
      mmap(NULL, (size_t)count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return; /* a machine without the addresses */
  start_hollow();
  blank(room + arrived - 5, 8);
  fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, arrived);
  SUCCEEDS(receive(U8, room, count, status));
  CHECK_EQUAL(called("MPI_Mrecv", 0)->out_bytes, count);
  CHECK(is_blank(room, (size_t)arrived - 5, (size_t)arrived) && is_zero(room, (size_t)arrived, (size_t)count));
  munmap(room, (size_t)count);
}

/* An allreduce that is long enough goes in pieces, if the communicator has them; a shorter one, or another operation,
 * does not. */
static void a_long_allreduce_goes_in_pieces(void) {
  struct communicator *comm = world(PLACE, SIZE);
  comm->piece = 64;
  static const int64_t counts[] = {0, 1, 31, 32, 33, 48, 50};
  FOR_EACH (const int64_t *, n, counts) {
    int64_t bytes = *n * 8, expected = bytes < 4 * 64 ? 1 : (*n + 7) / 8;
    context("%d elements", (int)*n);
    fake->reset();
    fill(in, ROOM);
    blank(out, ROOM);
    SUCCEEDS(RUN("allreduce", ARRAY(F64, in, *n), ARRAY(F64, out, *n), COMM(comm), reduction("SUM")));
    CHECK_EQUAL(times_called("MPI_Allreduce"), expected);
    for (int64_t i = 0; i < bytes; i++) CHECK_EQUAL(out[i], (unsigned char)(in[i] + SIZE));
    CHECK(is_blank(out, (size_t)bytes, ROOM));
  }
  fake->reset();
  SUCCEEDS(RUN("scan", ARRAY(F64, in, 50), ARRAY(F64, out, 50), COMM(comm), reduction("SUM")));
  CHECK_EQUAL(times_called("MPI_Scan"), 1);
  comm->piece = 0;
}

static const struct test tests[] = {
    TEST(a_lowered_limit_changes_no_result),
    TEST(true_counts_are_not_cut),
    TEST(true_counts_in_place),
    TEST(a_huge_message_for_a_small_result_is_refused),
    TEST(a_huge_message_longer_than_a_huge_result_is_refused),
    TEST(a_message_shorter_than_a_huge_result_is_refused),
    TEST(the_rest_of_a_huge_result_is_zero),
    TEST(a_long_allreduce_goes_in_pieces),
};

MAIN(tests)
