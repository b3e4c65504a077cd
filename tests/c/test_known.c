/* Known defects. Each test is expected to fail; the one that mends its cause moves it to the file of its subject. */
#include "harness.h"

enum { N = 7 };
static float in[N], out[N];

/* When the third of four operations cannot be made, the two before it are left. */
static void half_operations_give_back_what_they_made(void) {
  intptr_t handles[4];
  fake->fail("MPI_Op_create", 3, 77);
  CHECK_EQUAL(backend->half_operations(false, handles), 77);
}

/* A message is matched before the type to receive it is made; an error between the two loses it. */
static void a_message_is_not_lost_by_an_error(void) {
  static const char *const functions[] = {"MPI_Type_contiguous", "MPI_Type_create_struct", "MPI_Type_commit"};
  runtime.max_count = 3;
  fake->deliver(world(0, 2)->handle, 1, 9, in, sizeof in);
  FOR_EACH (const char *const *, function, functions) {
    context("%s", *function);
    fake->fail(*function, 1, 77);
    FAILS(RUN("recv", NONE, ARRAY(F32, out, N), COMM(world(0, 2)), 1, 0, 9), FFI_INTERNAL, "for 77");
  }
  SUCCEEDS(RUN("recv", NONE, ARRAY(F32, out, N), COMM(world(0, 2)), 1, 0, 9));
}

static const struct test tests[] = {
    TEST(half_operations_give_back_what_they_made),
    TEST(a_message_is_not_lost_by_an_error),
};

MAIN(tests)
