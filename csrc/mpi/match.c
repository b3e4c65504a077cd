#include "mpi/match.h"

#include <sched.h>

#include "execute/body.h"

_Static_assert(sizeof(MPI_Status) <= sizeof((struct message_info *)0)->status, "a status fits");

static void set_info(struct message_info *info, intptr_t message, const MPI_Status *status) {
  *info = (struct message_info){.source = status->MPI_SOURCE, .tag = status->MPI_TAG, .handle = message};
  memcpy(info->status, status, sizeof *status);
}

int probe_message(const struct communicator *comm, int source, int tag, bool *there, struct message_info *info) {
  MPI_Status status;
  int flag = 0, code = mpi.Iprobe(source, tag, handle_of_comm(comm), &flag, &status);
  *there = code == MPI_SUCCESS && flag;
  if (*there) set_info(info, 0, &status);
  return code;
}

int match_message(const struct communicator *comm, int source, int tag, bool *there, struct message_info *info) {
  MPI_Message message;
  MPI_Status status;
  int flag = 0, code = mpi.Improbe(source, tag, handle_of_comm(comm), &flag, &message, &status);
  *there = code == MPI_SUCCESS && flag;
  if (*there) set_info(info, (intptr_t)message, &status);
  return code;
}

void receive_message(struct receive *receive) {
  int64_t bytes = message_bytes(status_of(receive));
  bool labelled = receive->request != NULL && has_labels(); /* then the wait checks it, whatever the size */
  if (receive->waited_for || bytes < 0 || (bytes != receive->bytes && !labelled)) return;
  if (receive->memory == NULL &&
      (receive->request == NULL || !request_room(receive->request, (size_t)bytes, &receive->memory)))
    return;
  struct span span = span_of_bytes(bytes);
  if (span.code != MPI_SUCCESS) return;
  MPI_Message message = (MPI_Message)receive->info.handle;
  MPI_Request request;
  receive->function = "MPI_Imrecv";
  receive->code = mpi.Imrecv(receive->memory, span.count, span.type, &message, &request);
  if (receive->code == MPI_SUCCESS) receive->handle = (intptr_t)request;
  receive->state = RECEIVE_UNDER_WAY;
  span_free(&span);
}

ffi_error *add_unexpected(const struct call *call, MPI_Message message, const MPI_Status *status) {
  struct message_info info;
  set_info(&info, (intptr_t)message, status);
  return queue_add_unexpected(call->comm, &info) ? NULL : call_fail(call, FFI_INTERNAL, "no memory to keep a message");
}

static void await_match(struct receive *receive) {
  for (queue_match(); queue_has(receive); queue_match()) sched_yield();
}

ffi_error *await_posted_message(struct call *call, int source, int tag, MPI_Message *message, MPI_Status *status) {
  struct receive receive = {.comm = call->comm, .source = source, .tag = tag, .waited_for = true};
  if (source == ABI_PROC_NULL) {
    TRY_MPI(call, Mprobe, source, tag, handle_of_comm(call->comm), message, status);
    return NULL;
  }
  request_post(&receive);
  await_match(&receive);
  if (receive.state == RECEIVE_IDLE) return call_check(call); /* the communicator has been freed */
  if (receive.code != MPI_SUCCESS) return call_fail_in(call, receive.function, receive.code);
  *message = (MPI_Message)receive.info.handle;
  *status = *status_of(&receive);
  return NULL;
}

/* --- requests --- */

void note_code(struct request *request, const char *function, int code) {
  if (code != MPI_SUCCESS && request->code == MPI_SUCCESS) request->code = code, request->function = function;
}

bool test_handle(struct request *request, intptr_t *handle) {
  MPI_Request tested = (MPI_Request)*handle;
  MPI_Status ignored;
  int done = 1, code = mpi.Test(&tested, &done, &ignored);
  *handle = (intptr_t)tested;
  note_code(request, "MPI_Test", code);
  return code == MPI_SUCCESS && !done;
}

bool test_begun(struct request *request) {
  bool under_way = false;
  for (int i = 0; i < request->handle_count; i++) under_way |= test_handle(request, &request->handles[i]);
  for (int i = 0; i < request->receive_count; i++) {
    struct receive *receive = &request->receives[i];
    if (queue_has(receive))
      under_way = true;
    else if (receive->state == RECEIVE_UNDER_WAY && receive->code == MPI_SUCCESS)
      under_way |= test_handle(request, &receive->handle);
  }
  return under_way;
}

/* Complete one handle. Match messages for posted receives meanwhile, so that they do not wait for this handle. */
static void complete_handle(struct request *request, intptr_t *handle) {
  while (queue_posted() > 0 && test_handle(request, handle)) {
    queue_match();
    sched_yield();
  }
  MPI_Request waited = (MPI_Request)*handle;
  MPI_Status ignored;
  note_code(request, "MPI_Wait", mpi.Wait(&waited, &ignored));
}

void complete_handles(struct request *request) {
  for (int i = 0; i < request->handle_count; i++) complete_handle(request, &request->handles[i]);
}

bool complete_receive(struct request *request, struct receive *receive) {
  if (receive->exclusive) request_post(receive);
  receive->exclusive = false;
  queue_await(receive);
  await_match(receive);
  note_code(request, receive->function, receive->code);
  if (receive->state == RECEIVE_UNDER_WAY && receive->code == MPI_SUCCESS) complete_handle(request, &receive->handle);
  return receive->state != RECEIVE_IDLE && receive->code == MPI_SUCCESS;
}
