/* The code between XLA and the bodies: frames, attributes, buffers, communicators, the function table. */
#include <dlfcn.h>

#include "requests/table.h"
#include "harness.h"

/* XLA finds operations by their names, and passes attributes sorted by theirs. */
TEST(names_are_in_order) {
  for (int i = 0; i < OPERATION_COUNT; i++) {
    const struct operation *row = &operation_table[i];
    context("%s", row->id);
    CHECK_EQUAL(row->row, i);
    for (int k = 0; k < i; k++) CHECK(strcmp(operation_table[k].id, row->id) != 0);
    for (int k = 1; k < row->attribute_count; k++)
      CHECK(strcmp(row->attributes[k - 1].name, row->attributes[k].name) < 0);
    CHECK(memory_host.handlers[i] != NULL);
  }
  CHECK(operation_table[OPERATION_COUNT].id == NULL);
}

TEST(metadata_query_is_answered) {
  for (int i = 0; i < OPERATION_COUNT; i++) {
    ffi_metadata metadata = {.struct_size = sizeof metadata, .version = {.major = 7, .minor = 7}, .traits = 7};
    ffi_metadata_extension extension = {{sizeof extension, FFI_EXTENSION_METADATA, NULL}, &metadata};
    ffi_frame frame = {.struct_size = sizeof frame, .extension = &extension.base, .stage = FFI_STAGE_EXECUTE};
    context("%s", operation_table[i].id);
    SUCCEEDS(memory_host.handlers[i](&frame));
    CHECK_EQUAL(metadata.version.major, 0);
    CHECK_EQUAL(metadata.version.minor, 1);
    CHECK_EQUAL(metadata.traits, 0);
  }
  CHECK_EQUAL(fake->call_count, 0);
}

TEST(another_extension_is_passed_over) {
  ffi_extension other = {sizeof other, (enum ffi_extension_type)99, NULL};
  struct frame f;
  frame_make(&f, "barrier", NONE, NONE, (const int64_t[]){COMM(world(0, 2))});
  f.frame.extension = &other;
  SUCCEEDS(frame_call(&f, "barrier"));
  CHECK_EQUAL(times_called("MPI_Barrier"), 1);
}

TEST(only_execution_communicates) {
  struct frame made;
  frame_make(&made, "barrier", NONE, NONE, (const int64_t[]){COMM(world(0, 2))});
  made.frame.stage = FFI_STAGE_INSTANTIATE;
  SUCCEEDS(frame_call(&made, "barrier"));
  for (int i = 0; i < OPERATION_COUNT; i++)
    FOR_VALUES (enum ffi_stage, stage, FFI_STAGE_PREPARE, FFI_STAGE_INITIALIZE, 4) {
      /* No attribute or buffer may be looked at: they need not be there. */
      ffi_frame frame = {.struct_size = sizeof frame, .stage = *stage};
      context("%s in stage %d", operation_table[i].id, (int)*stage);
      SUCCEEDS(memory_host.handlers[i](&frame));
    }
  CHECK_EQUAL(fake->call_count, 0);
}

/* --- attributes --- */

static float x[4], y[4];

/* As XLA makes a program: there are no buffers yet. */
static struct frame instance;
static void bcast_instance(void) {
  frame_make(&instance, "bcast", NONE, NONE, (const int64_t[]){COMM(world(0, 2)), 0});
  instance.frame.stage = FFI_STAGE_INSTANTIATE;
}

static void instance_fails(const char *text) {
  FAILS(frame_call(&instance, "bcast"), FFI_INTERNAL, "jaxmpi.bcast: ", text, "reinstall");
  CHECK_EQUAL(fake->call_count, 0);
}

TEST(wrong_attributes_are_refused) {
  for (int count = 0; count < 5; count++) {
    bcast_instance();
    instance.frame.attributes.size = count;
    if (count != 3) instance_fails("attributes where the core expects 3");
  }
  FOR_VALUES (string, name, "toor", "roo", "roots", "") {
    bcast_instance();
    instance.spans[2] = (ffi_span){*name, strlen(*name)};
    instance_fails("attribute 2 is not the integer root");
  }
  bcast_instance();
  instance.attribute_types[2] = 4; /* a string */
  instance_fails("attribute 2 is not the integer root");
  bcast_instance();
  instance.scalars[0].dtype = S32;
  instance_fails("attribute 0 is not the integer comm");
}

TEST(attributes_need_no_alignment) {
  struct frame f;
  char bytes[sizeof(int64_t) + 1];
  int64_t root = 1;
  memcpy(bytes + 1, &root, sizeof root);
  frame_make(&f, "bcast", NONE, ARRAY(F32, y, 4), (const int64_t[]){COMM(world(0, 2)), 0});
  f.scalars[2].value = bytes + 1;
  SUCCEEDS(frame_call(&f, "bcast"));
  CHECK_EQUAL(called("MPI_Bcast", 0)->peer, 1);
}

/* --- buffers --- */

TEST(an_unknown_type_is_refused) {
  FOR_VALUES (int, dtype, -1, 0, 13, 14, 21, 39, 40, 1000000) {
    context("type %d", *dtype);
    FAILS(RUN("send", ARRAY(*dtype, x, 4), NONE, COMM(world(1, 3)), 0, 0), FFI_UNIMPLEMENTED,
          "jaxmpi.send on rank 1 of 3", "cannot be communicated");
    FAILS(RUN("bcast", NONE, ARRAY(*dtype, x, 4), COMM(world(1, 3)), 0), FFI_UNIMPLEMENTED, "cannot be communicated");
  }
  FAILS(RUN("sendrecv", ARRAY(F32, x, 4), ARRAY(0, y, 4), COMM(world(1, 3)), 0, 0, 0, 0, 0), FFI_UNIMPLEMENTED,
        "number 0");
  runtime.known[F32] = false; /* a type that the loaded MPI has not */
  FAILS(RUN("send", ARRAY(F32, x, 4), NONE, COMM(world(1, 3)), 0, 0), FFI_UNIMPLEMENTED, "number 11");
  runtime.known[F32] = true;
  CHECK_EQUAL(fake->call_count, 0);
}

TEST(tokens_are_not_buffers) {
  struct frame f;
  for (int size = 0; size < 2; size++) { /* no token, as in a call without an effect, and one */
    frame_make(&f, "bcast", NONE, ARRAY(F32, y, 4), (const int64_t[]){COMM(world(0, 2)), 1});
    f.frame.operands.size = size;
    SUCCEEDS(frame_call(&f, "bcast"));
    CHECK(called("MPI_Bcast", size)->in == y);
  }
}

TEST(the_count_is_the_product_of_the_dimensions) {
  int64_t dims[] = {2, 3, 5, 7};
  ffi_buffer buffer = {.dims = dims};
  static const int64_t products[] = {1, 2, 6, 30, 210};
  for (buffer.rank = 0; buffer.rank < 5; buffer.rank++) CHECK_EQUAL(ffi_count(&buffer), products[buffer.rank]);
  dims[1] = 0;
  buffer.rank = 4;
  CHECK_EQUAL(ffi_count(&buffer), 0);
  dims[0] = 1ll << 20, dims[1] = 1ll << 20, buffer.rank = 2;
  CHECK_EQUAL(ffi_count(&buffer), 1ll << 40);
}

TEST(every_type_has_one_row) {
  int rows = 0;
  for (const struct datatype *row = datatype_table; row->name != NULL; row++, rows++) {
    context("%s", row->name);
    CHECK(datatype_find(row->code) == row);
  }
  for (int code = -2; code < DTYPE_CODES + 2; code++) rows -= datatype_find(code) != NULL;
  CHECK_EQUAL(rows, 0);
  CHECK(datatype_find(FFI_DTYPE_TOKEN) == NULL);
}

/* --- communicators --- */

static struct communicator *communicator_of(intptr_t handle) {
  struct communicator *found = NULL;
  CHECK_EQUAL(abi->communicator(handle, NULL, &found), 0);
  return found;
}

TEST(a_communicator_is_one_struct) {
  intptr_t first = fake->comm_new(2, 4), second = fake->comm_new(0, 1);
  struct communicator *a = communicator_of(first), *b = communicator_of(second);
  CHECK(communicator_of(first) == a && a != b);
  CHECK(a->rank == 2 && a->size == 4 && a->handle == first && !a->freed);
  fake->comm_free(first);
  CHECK(a->freed && !b->freed);
  fake->comm_free(second);
}

TEST(a_recycled_handle_is_another_communicator) {
  intptr_t handle = fake->comm_new(0, 2);
  struct communicator *old = communicator_of(handle);
  fake->comm_free(handle);
  CHECK_EQUAL(fake->comm_new(1, 3), handle);
  struct communicator *new = communicator_of(handle);
  CHECK(new != old && old->freed && !new->freed &&new->rank == 1 && new->size == 3);
  SUCCEEDS(RUN("barrier", NONE, NONE, COMM(new)));
  FAILS(RUN("barrier", NONE, NONE, COMM(old)), FFI_FAILED_PRECONDITION, "freed");
  CHECK_EQUAL(times_called("MPI_Barrier"), 1);
  fake->comm_free(handle);
}

TEST(a_duplicate_is_another_communicator) {
  intptr_t handle = fake->comm_new(1, 3);
  struct communicator *old = communicator_of(handle);
  intptr_t duplicate = fake->comm_dup(handle);
  struct communicator *new = communicator_of(duplicate);
  CHECK(new != NULL &&new != old &&new->handle == duplicate &&new->rank == 1 && new->size == 3);
  fake->comm_free(duplicate);
  CHECK(new != NULL &&new->freed && !old->freed);
  fake->comm_free(handle);
}

TEST(a_freed_communicator_is_refused_by_all) {
  intptr_t handle = fake->comm_new(1, 3);
  struct communicator *comm = communicator_of(handle);
  fake->comm_free(handle);
  fake->reset();
  for (int i = 0; i < OPERATION_COUNT; i++) {
    context("%s", operation_table[i].id);
    if (i == ROW_after || i == ROW_done) continue; /* they use none */
    if (waits_for_request(i)) continue;            /* what is in flight is completed */
    FAILS(RUN(operation_table[i].id, ARRAY(F32, x, 3), ARRAY(F32, y, 3), COMM(comm), 0, 0, 0, 0, 0),
          FFI_FAILED_PRECONDITION, operation_table[i].name, "on rank 1 of 3", "the communicator has been freed",
          "live");
  }
  CHECK_EQUAL(fake->call_count, 0);
}

TEST(making_a_communicator_can_fail) {
  intptr_t handle = fake->comm_new(0, 2);
  struct communicator *comm = NULL;
  FOR_VALUES (string, function, "MPI_Comm_get_attr", "MPI_Comm_rank", "MPI_Comm_size", "MPI_Comm_set_attr") {
    context("%s", *function);
    fake->fail(*function, 1, 77);
    CHECK_EQUAL(abi->communicator(handle, NULL, &comm), 77);
  }
  CHECK_EQUAL(abi->communicator(handle, NULL, &comm), 0);
  CHECK(comm != NULL && comm->size == 2);
  fake->comm_free(handle);
}

/* --- loading --- */

TEST(loading_names_what_is_missing) {
  void *nothing = dlopen("libm.so.6", RTLD_NOW);
  const char *missing = abi->load(nothing);
  CHECK(missing != NULL && strcmp(missing, "MPI_Abort") == 0);
  dlclose(nothing);
  fake->fail("MPI_Comm_create_keyval", 1, 77);
  missing = abi->load(fake_library);
  CHECK(missing != NULL && strcmp(missing, "MPI_Comm_create_keyval") == 0);
  CHECK(abi->load(fake_library) == NULL);
}

TEST(error_texts_are_the_librarys) {
  char text[1024];
  abi->error_text(5, text);
  CHECK(strcmp(text, "the fake's text for 5") == 0);
  fake->fail("MPI_Error_string", 1, 77);
  abi->error_text(5, text);
  CHECK(strcmp(text, "MPI error code 5") == 0);
  abi->error_text(CODE_NO_MEMORY, text);
  CHECK(strcmp(text, "no memory") == 0);
}
