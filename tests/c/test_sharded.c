/* JAX's sharded programs: what XLA calls by MPItrampoline's names, its communicators, its errors. */
#include "sharded/sharded.h"

#include "harness.h"

typedef uintptr_t handle;
extern const handle MPIABI_COMM_WORLD, MPIABI_BYTE, MPIABI_SUM, MPIABI_PROD, MPIABI_MAX, MPIABI_MIN;
extern const handle MPIABI_INT8_T, MPIABI_INT16_T, MPIABI_INT32_T, MPIABI_INT64_T, MPIABI_UINT8_T, MPIABI_UINT16_T,
    MPIABI_UINT32_T, MPIABI_UINT64_T, MPIABI_FLOAT, MPIABI_DOUBLE, MPIABI_C_COMPLEX, MPIABI_C_DOUBLE_COMPLEX;
extern const int MPIABI_SUCCESS, MPIABI_UNDEFINED, MPIABI_THREAD_FUNNELED;
int MPIABI_Init_thread(int *, char ***, int, int *);
int MPIABI_Finalize(void);
int MPIABI_Is_thread_main(int *);
int MPIABI_Error_string(int, char *, int *);
int MPIABI_Comm_rank(handle, int *);
int MPIABI_Comm_size(handle, int *);
int MPIABI_Comm_split(handle, int, int, handle *);
int MPIABI_Comm_free(handle *);
int MPIABI_Allreduce(const void *, void *, int, handle, handle, handle);
int MPIABI_Allgather(const void *, int, handle, void *, int, handle, handle);
int MPIABI_Reduce_scatter(const void *, void *, const int *, handle, handle, handle);
int MPIABI_Irecv(void *, int, handle, int, int, handle, handle *);
int MPIABI_Isend(const void *, int, handle, int, int, handle, handle *);
int MPIABI_Wait(handle *, void *);
int MPIABI_Sendrecv(const void *, int, handle, int, int, void *, int, handle, int, int, handle, void *);

enum { ROOM = 512, OWN = 1, SIZE = 3 };
static _Alignas(16) unsigned char in[ROOM], out[ROOM], expected[ROOM];
static const int ranks[SIZE] = {3, 1, 0}; /* of COMM_WORLD, where this is rank 1 of 4 */

static const char *error(void) {
  static char text[1024];
  int length = 0;
  MPIABI_Error_string(1, text, &length);
  CHECK_EQUAL(length, strlen(text));
  CHECK(length < 512);
  return text;
}
#define SAYS(text) CHECK(strstr(error(), text) != NULL)

void prepare(void) {
  static const char *const names[] = {"SUM", "PROD", "MAX", "MIN"};
  fake->reset();
  fill(in, ROOM);
  blank(out, ROOM);
  runtime.world = world(1, 4);
  for (const struct datatype *row = datatype_table; row->name != NULL; row++)
    for (int i = 0; i < 4; i++) runtime.reductions[row->code][i] = registry_at(reduction(names[i]));
}

/* Makes the communicator of a group; NULL: it failed. */
static struct communicator *connect(const int members[], int size) {
  struct group *group = malloc(sizeof *group + (size_t)size * sizeof *members);
  struct communicator *made = NULL;
  group->size = size;
  memcpy(group->ranks, members, (size_t)size * sizeof *members);
  if (sharded_connect(group)) CHECK_EQUAL(runtime.abi->communicator(group->handle, NULL, &made), 0);
  free(group);
  return made;
}

static handle split(const struct communicator *expects, int rank) {
  handle made = 0;
  sharded_expect((struct communicator *)(uintptr_t)expects);
  CHECK_EQUAL(MPIABI_Comm_split(MPIABI_COMM_WORLD, 0, rank, &made), 0);
  return made;
}

static handle comm(void) {
  prepare();
  return split(connect(ranks, SIZE), OWN);
}

TEST(predefined_handles_differ) {
  const handle all[] = {MPIABI_BYTE,    MPIABI_INT8_T,    MPIABI_INT16_T,         MPIABI_INT32_T,  MPIABI_INT64_T,
                        MPIABI_UINT8_T, MPIABI_UINT16_T,  MPIABI_UINT32_T,        MPIABI_UINT64_T, MPIABI_FLOAT,
                        MPIABI_DOUBLE,  MPIABI_C_COMPLEX, MPIABI_C_DOUBLE_COMPLEX};
  enum { COUNT = sizeof all / sizeof *all };
  for (int i = 0; i < COUNT; i++)
    for (int k = 0; k < i; k++) CHECK(all[i] != all[k]);
  CHECK(MPIABI_SUM != MPIABI_PROD && MPIABI_MAX != MPIABI_MIN && MPIABI_SUM != MPIABI_MAX);
  CHECK_EQUAL(MPIABI_SUCCESS, 0);
}

TEST(a_communicator_is_the_one_expected) {
  int rank = -1, size = -1, provided = -1, flag = 0;
  CHECK_EQUAL(MPIABI_Init_thread(NULL, NULL, MPIABI_THREAD_FUNNELED, &provided), 0);
  CHECK_EQUAL(MPIABI_Is_thread_main(&flag), 0);
  CHECK(flag);
  struct communicator *made = connect(ranks, SIZE);
  if (!CHECK(made != NULL)) return;
  CHECK_EQUAL(fake->live_groups, 0);
  handle found = split(made, OWN);
  CHECK_EQUAL(MPIABI_Comm_rank(found, &rank) + MPIABI_Comm_size(found, &size), 0);
  CHECK_EQUAL(rank, OWN);
  CHECK_EQUAL(size, SIZE);
  CHECK_EQUAL(MPIABI_Comm_rank(MPIABI_COMM_WORLD, &rank), 0);
  CHECK_EQUAL(rank, 1);
  CHECK_EQUAL(MPIABI_Comm_free(&found), 0);
  CHECK_EQUAL(MPIABI_Finalize(), 0);
}

/* Whoever gets none, of a program that was not looked at, learns of it in the first operation. */
TEST(none_is_made_up) {
  struct communicator *made = connect(ranks, SIZE);
  handle none[] = {split(NULL, 0), split(made, OWN + 1)};
  FOR_EACH (handle *, found, none) {
    int rank = -1, counts[] = {1, 1, 1};
    handle request = 0;
    CHECK(MPIABI_Comm_rank(*found, &rank) != 0);
    CHECK(MPIABI_Comm_size(*found, &rank) != 0);
    CHECK(MPIABI_Allreduce(in, out, 1, MPIABI_FLOAT, MPIABI_SUM, *found) != 0);
    SAYS("docs/sharded.md");
    CHECK(MPIABI_Allgather(in, 1, MPIABI_FLOAT, out, 1, MPIABI_FLOAT, *found) != 0);
    CHECK(MPIABI_Reduce_scatter(in, out, counts, MPIABI_FLOAT, MPIABI_SUM, *found) != 0);
    CHECK(MPIABI_Isend(in, 4, MPIABI_BYTE, 0, 0, *found, &request) != 0);
    CHECK(MPIABI_Irecv(out, 4, MPIABI_BYTE, 0, 0, *found, &request) != 0);
    CHECK(MPIABI_Sendrecv(in, 4, MPIABI_BYTE, 0, 0, out, 4, MPIABI_BYTE, 0, 0, *found, NULL) != 0);
    CHECK_EQUAL(MPIABI_Wait(&request, NULL), 0);
  }
  CHECK(is_blank(out, 0, ROOM));
}

TEST(one_for_this_rank_alone) {
  static const int own[] = {1};
  int size = 0;
  struct communicator *made = connect(own, 1), *several = connect(ranks, SIZE);
  sharded_expect(made);
  handle found = split(several, OWN);
  CHECK_EQUAL(MPIABI_Comm_size(found, &size), 0);
  CHECK_EQUAL(size, SIZE);
  CHECK_EQUAL(MPIABI_Comm_split(MPIABI_COMM_WORLD, 0, 0, &found), 0);
  CHECK_EQUAL(MPIABI_Comm_size(found, &size), 0);
  CHECK_EQUAL(size, 1);
  CHECK_EQUAL(MPIABI_Comm_split(MPIABI_COMM_WORLD, 0, 0, &found), 0);
  CHECK(MPIABI_Comm_size(found, &size) != 0);
}

TEST(connecting_may_fail) {
  FOR_VALUES (string, function, "MPI_Comm_group", "MPI_Group_incl", "MPI_Comm_create_group") {
    prepare();
    fake->fail(*function, 1, 77);
    CHECK(connect(ranks, SIZE) == NULL);
    CHECK_EQUAL(fake->live_groups, 0);
    SAYS("jaxmpi, setup of JAX's collectives on rank 1 of 4");
  }
  static const int without[] = {0, 2};
  prepare();
  CHECK(connect(without, 2) == NULL);
  SAYS("MPI_Comm_create_group failed");
}

static const struct {
  const handle *type;
  int code;
} types[] = {{&MPIABI_INT8_T, 2},  {&MPIABI_INT16_T, 3},  {&MPIABI_INT32_T, 4},    {&MPIABI_INT64_T, 5},
             {&MPIABI_UINT8_T, 6}, {&MPIABI_UINT16_T, 7}, {&MPIABI_UINT32_T, 8},   {&MPIABI_UINT64_T, 9},
             {&MPIABI_FLOAT, 11},  {&MPIABI_DOUBLE, 12},  {&MPIABI_C_COMPLEX, 15}, {&MPIABI_C_DOUBLE_COMPLEX, 18}};

TEST(reductions_and_gathers) {
  static const char *const names[] = {"SUM", "PROD", "MAX", "MIN"};
  const handle ops[] = {MPIABI_SUM, MPIABI_PROD, MPIABI_MAX, MPIABI_MIN};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    size_t bytes = 5 * datatype_find(types[i].code)->bytes;
    context("type %d", types[i].code);
    for (int op = 0; op < 4; op++) {
      handle found = comm();
      CHECK_EQUAL(MPIABI_Allreduce(in, out, 5, *types[i].type, ops[op], found), 0);
      const struct fake_call *call = called("MPI_Allreduce", 0);
      CHECK(call->in == in && call->in_count == 5 && call->in_type == datatype(types[i].code));
      CHECK(call->op == operation_handle(names[op]));
      for (size_t k = 0; k < bytes; k++) expected[k] = (unsigned char)(in[k] + SIZE);
      CHECK_SAME(out, expected, bytes);
      CHECK(is_blank(out, bytes, ROOM));
    }
    handle found = comm();
    CHECK_EQUAL(MPIABI_Allgather(in, 5, *types[i].type, out, 5, *types[i].type, found), 0);
    for (int r = 0; r < SIZE; r++)
      for (size_t k = 0; k < bytes; k++) expected[(size_t)r * bytes + k] = (unsigned char)(in[k] + r - OWN);
    CHECK_SAME(out, expected, SIZE * bytes);
    found = comm();
    const int counts[SIZE] = {1, 1, 1};
    CHECK_EQUAL(MPIABI_Reduce_scatter(in, out, counts, *types[i].type, MPIABI_SUM, found), 0);
    for (size_t k = 0; k < bytes / 5; k++) expected[k] = (unsigned char)(in[OWN * bytes / 5 + k] + SIZE);
    CHECK_SAME(out, expected, bytes / 5);
    CHECK(is_blank(out, bytes / 5, ROOM));
  }
  handle found = comm(); /* in place */
  CHECK_EQUAL(MPIABI_Allreduce(in, in, 5, MPIABI_FLOAT, MPIABI_SUM, found), 0);
  CHECK(called("MPI_Allreduce", 0)->in == fake->in_place);
}

TEST(messages) {
  handle found = comm(), receives = 0, sends[2] = {0, 0};
  CHECK_EQUAL(MPIABI_Irecv(out, 12, MPIABI_BYTE, OWN, 0, found, &receives), 0);
  CHECK_EQUAL(MPIABI_Isend(in, 12, MPIABI_BYTE, OWN, 0, found, &sends[0]), 0);
  CHECK_EQUAL(MPIABI_Isend(in, 12, MPIABI_BYTE, 2, 0, found, &sends[1]), 0);
  CHECK_EQUAL(fake->live_requests, 2);
  CHECK_EQUAL(MPIABI_Wait(&receives, NULL) + MPIABI_Wait(&sends[0], NULL) + MPIABI_Wait(&sends[1], NULL), 0);
  CHECK_SAME(out, in, 12);
  CHECK(is_blank(out, 12, ROOM));
  found = comm();
  CHECK_EQUAL(MPIABI_Sendrecv(in, 8, MPIABI_BYTE, OWN, 0, out, 8, MPIABI_BYTE, OWN, 0, found, NULL), 0);
  CHECK_SAME(out, in, 8);
}

TEST(a_message_of_another_length) {
  handle found = comm(), request = 0;
  fake->deliver(((struct communicator *)found)->handle, 2, 0, in, 16);
  CHECK_EQUAL(MPIABI_Irecv(out, 12, MPIABI_BYTE, 2, 0, found, &request), 0);
  CHECK(MPIABI_Wait(&request, NULL) != 0);
  SAYS("has 16 bytes");
  CHECK(is_blank(out, 0, ROOM));
}

TEST(what_mpi_refuses_is_told) {
  handle request = 0, found = comm();
  fake->fail("MPI_Allreduce", 1, 77);
  CHECK(MPIABI_Allreduce(in, out, 5, MPIABI_FLOAT, MPIABI_SUM, found) != 0);
  SAYS("jaxmpi.allreduce on rank 1 of 3: MPI_Allreduce failed");
  fake->fail("MPI_Isend", 1, 77);
  CHECK(MPIABI_Isend(in, 4, MPIABI_BYTE, 2, 0, found, &request) != 0);
  SAYS("MPI_Isend failed");
  CHECK_EQUAL(request, 0);
  fake->fail("MPI_Wait", 1, 77);
  CHECK_EQUAL(MPIABI_Isend(in, 4, MPIABI_BYTE, 2, 0, found, &request), 0);
  CHECK(MPIABI_Wait(&request, NULL) != 0);
  SAYS("MPI_Wait failed");
  CHECK(MPIABI_Allreduce(in, out, -3, MPIABI_FLOAT, MPIABI_SUM, found) != 0);
  SAYS("too many elements");
  CHECK(MPIABI_Allreduce(in, out, 3, MPIABI_FLOAT, 7, found) != 0);
  SAYS("that jaxmpi does not have");
  CHECK(MPIABI_Allreduce(in, out, 3, MPIABI_SUM, MPIABI_SUM, found) != 0);
  SAYS("that jaxmpi does not have");
  fake->comm_free(((struct communicator *)found)->handle);
  CHECK(MPIABI_Allreduce(in, out, 3, MPIABI_FLOAT, MPIABI_SUM, found) != 0);
  SAYS("has been freed");
  fake->reset(); /* a request that MPI has kept */
}

TEST(one_call_at_a_time) {
  handle found = comm(), request = 0;
  runtime.serialize = true;
  CHECK_EQUAL(MPIABI_Allreduce(in, out, 5, MPIABI_FLOAT, MPIABI_SUM, found), 0);
  CHECK_EQUAL(MPIABI_Isend(in, 4, MPIABI_BYTE, 2, 0, found, &request), 0);
  CHECK_EQUAL(MPIABI_Wait(&request, NULL), 0);
  CHECK_EQUAL(pthread_mutex_trylock(&runtime.lock), 0);
  pthread_mutex_unlock(&runtime.lock);
  runtime.serialize = false;
}
