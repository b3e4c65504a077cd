#include "mpi/complete.h"

#include <sched.h>

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
    if (queue_has(receive, 1))
      under_way = true;
    else if (receive->state == RECEIVE_UNDER_WAY && receive->code == MPI_SUCCESS)
      under_way |= test_handle(request, &receive->handle);
  }
  return under_way;
}

/* Complete one handle. Match messages for posted receives meanwhile, so that they do not wait for this handle. */
static void complete_handle(struct request *request, intptr_t *handle) {
  while (queue_posted() > 0 && test_handle(request, handle)) {
    queue_match(NULL, NULL, 0);
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
