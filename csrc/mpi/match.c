#include "mpi/match.h"

#include <sched.h>

#include "execute/body.h"
#include "requests/table.h"

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

void await_match(struct receive *receive) {
  while (queue_match(NULL, receive, 1)) sched_yield();
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
