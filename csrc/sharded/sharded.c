#include "sharded/sharded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/abi.h"
#include "core/failure.h"
#include "devices/spaces.h"
#include "execute/body.h"

/* --- errors ------------------------------------------------------------------------------------------------------ */

static _Thread_local char error[480]; /* XLA has room for 512 characters */

ffi_error *sharded_fail(const char *text) {
  static char failed;
  snprintf(error, sizeof error, "%s", text);
  return (ffi_error *)&failed;
}

const char *sharded_error(void) { return error; }

static ffi_error *create_error(ffi_error_create_args *args) { return sharded_fail(args->message); }

static const ffi_api api = {.struct_size = sizeof api, .error_create = create_error};
static const ffi_frame frame = {.struct_size = sizeof frame, .api = &api};

/* --- calls ------------------------------------------------------------------------------------------------------- */

/* Begin a call. Callers set the other attributes, and pass the buffers in the order of ops.def. */
static void begin_call(struct call *call, int row, struct communicator *comm) {
  memset(call, 0, offsetof(struct call, buffers));
  call->frame = &frame;
  call->operation = &operation_table[row];
  call->comm = comm;
  call->memory = memory_spaces[0];
  call->reducer = REDUCER_MPI;
  call->attributes[call->operation->comm] = (int64_t)(intptr_t)comm;
}

static void pass_buffer(struct call *call, void *data, int64_t count, int type) {
  int i = call->buffer_count++;
  call->buffers[i] = (struct buffer){data, count, datatype_find(type), call->operation->buffers[i].role};
  call->first[i] = (short)i;
  call->first[i + 1] = call->buffer_count;
}

static void set_attribute(struct call *call, const char *name, int64_t value) {
  int i = 0;
  while (strcmp(call->operation->attributes[i].name, name) != 0) i++;
  call->attributes[i] = value;
}

/* Check the buffers of a call. XLA's number of elements may have exceeded an int. */
static ffi_error *check_count(const struct call *call) {
  for (int i = 0; i < call->buffer_count; i++)
    if (call->buffers[i].type == NULL)
      return call_fail(call, FFI_UNIMPLEMENTED, "XLA passes a datatype that jaxmpi does not have for it");
    else if (call->buffers[i].count < 0)
      return call_fail(
          call, FFI_UNIMPLEMENTED,
          "too many elements for one of JAX's collectives, which count by an int: divide the array, or use "
          "jaxmpi's own functions");
  return call_check(call);
}

static ffi_error *run_call(struct call *call) {
  ffi_error *failure = check_count(call);
  if (failure != NULL) return failure;
  call_settle(call);
  return call_body(call);
}

ffi_error *sharded_allreduce(const void *in, void *out, int count, int type, struct reduction *reduction,
                             struct communicator *comm) {
  struct call call;
  begin_call(&call, ROW_allreduce, comm);
  pass_buffer(&call, (void *)(uintptr_t)in, count, type);
  pass_buffer(&call, out, count, type);
  set_attribute(&call, "op", (int64_t)(intptr_t)reduction);
  return run_call(&call);
}

ffi_error *sharded_allgather(const void *in, int count, int type, void *out, struct communicator *comm) {
  struct call call;
  begin_call(&call, ROW_allgather, comm);
  pass_buffer(&call, (void *)(uintptr_t)in, count, type);
  pass_buffer(&call, out, (int64_t)count * comm->size, type);
  return run_call(&call);
}

ffi_error *sharded_reduce_scatter(const void *in, void *out, int count, int type, struct reduction *reduction,
                                  struct communicator *comm) {
  struct call call;
  begin_call(&call, ROW_reduce_scatter, comm);
  pass_buffer(&call, (void *)(uintptr_t)in, (int64_t)count * comm->size, type);
  pass_buffer(&call, out, count, type);
  set_attribute(&call, "op", (int64_t)(intptr_t)reduction);
  return run_call(&call);
}

ffi_error *sharded_exchange(const void *in, int bytes, int to, void *out, int from, struct communicator *comm) {
  struct call call;
  begin_call(&call, ROW_sendrecv, comm);
  pass_buffer(&call, (void *)(uintptr_t)in, bytes, FFI_DTYPE_U8);
  pass_buffer(&call, out, bytes, FFI_DTYPE_U8);
  set_attribute(&call, "dest", to);
  set_attribute(&call, "source", from);
  return run_call(&call);
}

/* --- messages ---------------------------------------------------------------------------------------------------- */

struct message {
  struct call call;
  bool sent;
  intptr_t request; /* the MPI_Request, if sent */
};

static struct message *message_of(const struct call *call) {
  struct message *message = malloc(sizeof *message);
  if (message == NULL) return NULL;
  call_copy(&message->call, call);
  message->sent = false;
  return message;
}

ffi_error *sharded_send(const void *in, int bytes, int to, struct communicator *comm, struct message **message) {
  struct call call;
  begin_call(&call, ROW_send, comm);
  pass_buffer(&call, (void *)(uintptr_t)in, bytes, FFI_DTYPE_U8);
  set_attribute(&call, "dest", to);
  ffi_error *failure = check_count(&call);
  if (failure != NULL) return failure;
  if ((*message = message_of(&call)) == NULL) return call_fail(&call, FFI_INTERNAL, "no memory for a message");
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  int code = runtime.abi->start_send(&call, &(*message)->request);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  (*message)->sent = true;
  if (code == 0) return NULL;
  free(*message);
  *message = NULL;
  call.function = "MPI_Isend";
  return call_fail_mpi(&call, code);
}

/* Prepare a receive. XLA's program sends all messages before it waits for those that it receives. So the wait receives
 * the message, as a call like any other. */
ffi_error *sharded_receive(void *out, int bytes, int from, struct communicator *comm, struct message **message) {
  struct call call;
  begin_call(&call, ROW_recv, comm);
  pass_buffer(&call, out, bytes, FFI_DTYPE_U8);
  set_attribute(&call, "source", from);
  ffi_error *failure = check_count(&call);
  if (failure != NULL) return failure;
  *message = message_of(&call);
  return *message != NULL ? NULL : call_fail(&call, FFI_INTERNAL, "no memory for a message");
}

ffi_error *sharded_wait(struct message *message) {
  ffi_error *failure;
  if (message->sent) {
    struct call wait;
    begin_call(&wait, ROW_complete, message->call.comm);
    set_attribute(&wait, "dest", message->call.attributes[1]);
    set_attribute(&wait, "request", (int64_t)(intptr_t)&message->request);
    failure = run_call(&wait);
  } else {
    failure = run_call(&message->call);
  }
  free(message);
  return failure;
}

/* --- communicators ----------------------------------------------------------------------------------------------- */

static struct communicator *_Atomic expected, *_Atomic alone;

ffi_error *sharded_connect(struct group *group) {
  struct call call;
  begin_call(&call, ROW_connect, runtime.world);
  set_attribute(&call, "group", (int64_t)(intptr_t)group);
  return run_call(&call);
}

void sharded_expect(struct communicator *comm) {
  bool single = comm != NULL && comm->size == 1;
  atomic_store(single ? &alone : &expected, comm);
}

struct communicator *sharded_expected(int rank) {
  struct communicator *comm = atomic_exchange(&expected, NULL);
  if (comm == NULL) comm = atomic_exchange(&alone, NULL);
  return comm != NULL && comm->rank == rank ? comm : NULL;
}
