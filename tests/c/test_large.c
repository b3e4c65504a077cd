/* More elements than an int holds: no count passed to MPI may be truncated.
 *
 * Tested in two ways: with a lowered limit, so that the code for large counts runs on real data; and with true counts,
 * on invalid pointers, with a library that touches no buffer.
 */
#include <dlfcn.h>
#include <limits.h>
#include <sys/mman.h>

#include "harness.h"

enum { PLACE = 1, SIZE = 3, ROOM = 1024 };

/* All but the barrier. */
#define FOR_OPERATIONS(usual) for (const struct usual *usual = usuals + 1; usual < usuals + USUALS; usual++)

static bool receives(const struct usual *usual) { return strstr(usual->operation, "recv") != NULL; }

static ffi_error *run_case(const struct usual *usual, int dtype, void *in, void *out, int64_t count) {
  context("%s, case %d, %lld elements of type %d", usual->operation, (int)(usual - usuals), (long long)count, dtype);
  return run_usual(usual, dtype, in, out, count, NULL);
}

/* --- the limit lowered --- */

static _Alignas(16) unsigned char in[ROOM], out[ROOM], whole[ROOM], message[ROOM];

static void run_small(const struct usual *usual, int dtype, int64_t count, int64_t limit) {
  fake->reset();
  runtime.max_count = limit;
  fill(in, ROOM);
  blank(out, ROOM);
  fill(message, ROOM);
  if (receives(usual))
    fake->deliver(world(PLACE, SIZE)->handle, 2, 9, message, count * (int64_t)datatype_find(dtype)->bytes);
  SUCCEEDS(run_case(usual, dtype, in, out, count));
}

/* No count beyond the limit, and together all. */
static void check_counts(const struct usual *usual, int64_t count, int64_t bytes, int64_t limit) {
  int64_t read = 0, written = 0;
  int calls = times_called(usual->function);
  for (int k = 0; k < calls; k++) {
    const struct fake_call *call = called(usual->function, k);
    CHECK(call->in_count <= limit && call->out_count <= limit);
    read += call->in_bytes;
    written += call->out_bytes;
  }
  int64_t chunks = reduces(usual) && count > 0 ? (count + limit - 1) / limit : 1;
  CHECK_EQUAL(calls, chunks);
  CHECK_EQUAL(read > written ? read : written, bytes);
}

TEST(a_lowered_limit_changes_no_result) {
  FOR_VALUES (int, dtype, U8, F32, C128)
    FOR_OPERATIONS (usual)
      for (int64_t count = 0; count <= 10; count++) {
        run_small(usual, *dtype, count, INT_MAX);
        memcpy(whole, out, ROOM);
        for (int64_t limit = 1; limit <= 10; limit++) {
          run_small(usual, *dtype, count, limit);
          CHECK_SAME(out, whole, ROOM);
          check_counts(usual, count, count * (int64_t)datatype_find(*dtype)->bytes, limit);
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

static void check_reduction(const struct usual *usual, int64_t count, int64_t size, bool in_place) {
  int64_t done = 0;
  for (int k = 0; k < times_called(usual->function); k++) {
    const struct fake_call *call = called(usual->function, k);
    int64_t pass = call->in_count;
    CHECK(pass > 0);
    CHECK(call->in == (in_place ? fake->in_place : nowhere_in + done * size));
    CHECK(usual->out == 0 || call->out == (in_place ? nowhere_in : nowhere_out) + done * size);
    CHECK_EQUAL(call->in_bytes, pass * size);
    done += pass;
  }
  CHECK_EQUAL(done, count);
  CHECK_EQUAL(times_called("MPI_Type_contiguous"), 0);
}

static void true_count(const struct usual *usual, const struct datatype *row, int64_t count) {
  int64_t size = (int64_t)row->bytes, bytes = count * size;
  start_hollow();
  if (receives(usual)) fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, bytes);
  SUCCEEDS(run_case(usual, row->code, nowhere_in, nowhere_out, count));
  if (reduces(usual)) {
    check_reduction(usual, count, size, false);
    return;
  }
  CHECK_EQUAL(times_called(usual->function), 1);
  const struct fake_call *call = called(usual->function, 0);
  bool sends = usual->in > 0, broadcast = is_usual(usual, "bcast");
  if (sends || broadcast) CHECK_EQUAL(call->in_bytes, bytes);
  if (usual->out > 0 && !broadcast && !is_usual(usual, "sendrecv")) CHECK_EQUAL(call->out_bytes, bytes);
  if (is_usual(usual, "sendrecv")) CHECK_EQUAL(called("MPI_Mrecv", 0)->out_bytes, bytes);
  if (sends) CHECK(call->in == nowhere_in);
  CHECK_EQUAL(times_called("MPI_Type_commit"), count <= INT_MAX ? 0 : is_usual(usual, "sendrecv") ? 2 : 1);
}

TEST(true_counts_are_not_cut) {
  FOR_OPERATIONS (usual)
    FOR_EACH (const int64_t *, count, counts)
      for (const struct datatype *row = datatype_table; row->name != NULL; row++) true_count(usual, row, *count);
}

TEST(true_counts_in_place) {
  FOR_OPERATIONS (usual)
    FOR_EACH (const int64_t *, count, counts) {
      if (!reduces(usual) || usual->out == 0) continue;
      start_hollow();
      SUCCEEDS(run_case(usual, F64, nowhere_in, nowhere_in, *count));
      check_reduction(usual, *count, 8, true);
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

TEST(a_huge_message_is_refused) {
  const struct {
    int dtype;
    int64_t count, bytes;
    const char *text;
  } cases[] = {
      {S16, 5, INT_MAX + 3ll, "2147483650 bytes (1073741825 elements of int16), the template 10 bytes (5 elements)"},
      {U8, INT_MAX + 6ll, INT_MAX + 7ll,
       "2147483654 bytes (2147483654 elements of uint8), the template 2147483653 bytes"}};
  for (size_t i = 0; i < 2 && counts_beyond_int(); i++) {
    start_hollow();
    fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, cases[i].bytes);
    FAILS(receive(cases[i].dtype, nowhere_out, cases[i].count, NULL), FFI_INVALID_ARGUMENT, cases[i].text, "truncated");
    CHECK_EQUAL(called("MPI_Mrecv", 0)->out_bytes, cases[i].bytes); /* the whole of it is taken */
  }
}

TEST(a_message_shorter_than_a_huge_result_is_refused) {
  FOR_VALUES (int64_t, bytes, 0, 4, 4004) {
    start_hollow();
    fake->deliver(world(PLACE, SIZE)->handle, 2, 9, NULL, *bytes);
    FAILS(receive(F32, nowhere_out, INT_MAX + 6ll, NULL), FFI_INVALID_ARGUMENT,
          "the template 8589934612 bytes (2147483653 elements)", "is too short");
  }
}

/* The rest of a huge result is found and zeroed: memory that is there once it is touched, the last bytes of it set. */
TEST(the_rest_of_a_huge_result_is_zero) {
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
TEST(a_long_allreduce_goes_in_pieces) {
  struct communicator *comm = world(PLACE, SIZE);
  comm->piece = 64;
  FOR_VALUES (int64_t, n, 0, 1, 31, 32, 33, 48, 50) {
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
