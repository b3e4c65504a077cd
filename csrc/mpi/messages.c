#include "mpi/messages.h"

#include "mpi/match.h"
#include "requests/table.h"

/* What is sent of a buffer: itself, or with JAXMPI_CHECK a copy behind a label. */
struct parcel {
  const void *data;
  struct span span;
  struct label *copy;
};

/* NULL: there is no memory for a label; the message is then not checked. */
static struct label *copy_labelled(const struct call *call, const struct buffer *in) {
  struct label *copy = malloc(sizeof *copy + buffer_bytes(in));
  if (copy == NULL) return NULL;
  *copy = label_of(call, in);
  if (in->count > 0) memcpy(copy + 1, in->data, buffer_bytes(in));
  return copy;
}

static inline struct parcel parcel_of(const struct call *call, const struct buffer *in) {
  struct label *copy = call->labelled ? copy_labelled(call, in) : NULL;
  if (copy == NULL) return (struct parcel){.data = in->data, .span = span_of(in->type, in->count)};
  return (struct parcel){copy, span_of_bytes((int64_t)(sizeof *copy + buffer_bytes(in))), copy};
}

static inline void parcel_free(struct parcel *parcel) {
  span_free(&parcel->span);
  free(parcel->copy);
}

/* An adjoint among those that have been started: `row` starts one like it. */
static inline ffi_error *check_adjoint(const struct call *c, int row, int64_t peer, int64_t tag) {
  return tag >= derivatives_tag() ? request_check_blocking(c, row, peer, tag) : NULL;
}

/* in: any shape */
ffi_error *BODY(send)(struct call *c) {
  ARGUMENTS(send, c);
  PASS(check_adjoint(c, ROW_isend, a.dest, a.tag));
  BEGIN(c, Send, "-> %d with tag %d and", (int)a.dest, (int)a.tag);
  struct parcel in = parcel_of(c, b.in);
  int code = in.span.code;
  if (code == MPI_SUCCESS) code = mpi.Send(in.data, in.span.count, in.span.type, (int)a.dest, (int)a.tag, comm);
  parcel_free(&in);
  TRY(c, code);
  return NULL;
}

/* `deadline`: 0, or until when the message is to be matched; `late`: that is over. */
static inline ffi_error *match_and_receive(struct call *call, const struct buffer *out, const struct span *span,
                                           int source, int tag, MPI_Status *users, double deadline, bool *late) {
  MPI_Message message;
  MPI_Status status;
  if (deadline > 0)
    PASS(match_in_time(call, source, tag, deadline, &message, &status, late));
  else
    PASS(match(call, source, tag, &message, &status));
  return receive_into(call, out, span, &message, &status, users);
}

/* out: the template's shape */
ffi_error *BODY(recv)(struct call *c) {
  ARGUMENTS(recv, c);
  PASS(check_adjoint(c, ROW_irecv, a.source, a.tag));
  BEGIN(c, Recv, "<- %d with tag %d and", (int)a.source, (int)a.tag);
  struct span out = span_of(b.out->type, b.out->count);
  TRY(c, out.code);
  bool late;
  double deadline = deadlines_on() ? deadline_of_receive(c) : 0;
  ffi_error *error = match_and_receive(c, b.out, &out, (int)a.source, (int)a.tag, object_of(a.status), deadline, &late);
  span_free(&out);
  return error;
}

/* Copies what is sent until a deadline into memory of a request: it may be under way for longer than the call. */
static __attribute__((noinline)) ffi_error *copy_to_request(struct call *c, const struct buffer *in,
                                                            const struct parcel *parcel, struct request **request) {
  float numbers[2];
  const struct buffer id = {numbers, 2, datatype_find(FFI_DTYPE_F32), ROLE_HOST_WRITE};
  size_t bytes = buffer_bytes(in) + (parcel->copy != NULL ? sizeof *parcel->copy : 0);
  PASS(request_new(c, &id, bytes + 1, 1, 0, request));
  if (bytes > 0) memcpy((*request)->data, parcel->data, bytes);
  return NULL;
}

/* Leaves to the library's thread what this rank has sent. */
static void leave_to_thread(struct request *request, MPI_Request sent, int64_t bytes) {
  request->handles[request->handle_count++] = (intptr_t)sent;
  request_leave(request, bytes);
}

/* in: any shape  out: the template's shape */
ffi_error *BODY(sendrecv)(struct call *c) {
  ARGUMENTS(sendrecv, c);
  PASS(check_adjoint(c, ROW_isend, a.dest, a.sendtag));
  PASS(check_adjoint(c, ROW_irecv, a.source, a.recvtag));
  BEGIN(c, Sendrecv, "<- %d with tag %d -> %d with tag %d and", (int)a.source, (int)a.recvtag, (int)a.dest,
        (int)a.sendtag);
  double deadline = deadlines_on() ? deadline_of_receive(c) : 0;
  struct parcel in = parcel_of(c, b.in);
  struct span out = span_of(b.out->type, b.out->count);
  struct request *request = NULL; /* only with a deadline */
  MPI_Request sent;
  bool late = false;
  int code = in.span.code != MPI_SUCCESS ? in.span.code : out.code;
  ffi_error *error = deadline > 0 ? copy_to_request(c, b.in, &in, &request) : NULL;
  if (error == NULL && code == MPI_SUCCESS) {
    c->function = "MPI_Isend";
    code = mpi.Isend(request != NULL ? request->data : in.data, in.span.count, in.span.type, (int)a.dest,
                     (int)a.sendtag, comm, &sent);
  }
  if (error == NULL && code == MPI_SUCCESS) {
    c->sending = true;
    error = match_and_receive(c, b.out, &out, (int)a.source, (int)a.recvtag, object_of(a.status), deadline, &late);
    c->sending = false;
    MPI_Status ignored; /* completed after an error too, so that this rank's message arrives */
    if (late)
      leave_to_thread(request, sent, (int64_t)buffer_bytes(b.in));
    else
      code = mpi.Wait(&sent, &ignored);
    c->function = code == MPI_SUCCESS ? "MPI_Sendrecv" : "MPI_Wait";
  }
  if (request != NULL && !late) request_end(request);
  parcel_free(&in);
  span_free(&out);
  return error != NULL || code == MPI_SUCCESS ? error : call_fail_mpi(c, code);
}

/* Receives the message of a peer into the stage, if it is the one that is expected; otherwise drops it. */
static ffi_error *receive_planned(struct call *c, const struct plan *plan, const struct peer *peer, char *stage,
                                  uint64_t expected) {
  MPI_Message message;
  MPI_Status status;
  uint64_t label = ~expected;
  PASS(match(c, peer->rank, plan->tag, &message, &status));
  int64_t bytes = message_bytes(&status);
  int code;
  if (bytes == peer->bytes) {
    code = receive_bytes(&message, stage + peer->stage, bytes, &status);
    memcpy(&label, stage + peer->stage, LABEL_BYTES);
  } else {
    code = message_discard(&message, bytes);
  }
  if (code == CODE_NO_MEMORY) return call_fail(c, FFI_INTERNAL, "no memory for a message of %" PRId64 " bytes", bytes);
  if (code != MPI_SUCCESS) return call_fail_in(c, "MPI_Mrecv", code);
  return label == expected ? NULL : fail_planned(c, peer, bytes);
}

/* Receives all messages, so that none is left to the next call, and takes them apart: each as it comes, or, where
 * results are not to change if one of them is wrong, at the end. `label`: what they begin with. */
static ffi_error *receive_all(struct call *c, const struct plan *plan, char *stage, uint64_t label) {
  ffi_error *error = NULL;
  bool at_once = !plan->combines && plan->begin != BEGINS_AS_OPERANDS && c->messages == NULL;
  int next = 0;
  for (int i = 0; i < plan->receive_count; i++) {
    const struct peer *peer = &plan->receives[i];
    error = call_first(c, error, receive_planned(c, plan, peer, stage, label));
    if (at_once && error == NULL) next = plan_unpack_until(c, plan, stage, next, peer->stage + peer->bytes);
  }
  if (error != NULL || c->messages != NULL) return error;
  if (at_once)
    plan_unpack_until(c, plan, stage, next, INT64_MAX);
  else
    plan_unpack(c, plan, stage);
  return NULL;
}

/* What the plan says. */
static ffi_error *by_plan(struct call *c) {
  MPI_Comm comm = handle_of_comm(c->comm);
  const struct plan *plan = plan_of(c);
  PASS(plan_check(c, plan));
  BEGIN(c, Isend, "to %d ranks and from %d with", plan->send_count, plan->receive_count);
  uint64_t label = plan_label(c, plan, atomic_fetch_add(&c->comm->planned, 1) + 1);
  size_t stage_bytes = (size_t)(plan->sent + plan->received);
  bool composed = c->messages != NULL; /* and taken apart, by the transport */
  size_t own_bytes = composed ? 0 : stage_bytes;
  struct scratch *scratch = scratch_take(own_bytes + (size_t)plan->send_count * sizeof(MPI_Request));
  if (scratch == NULL) return call_fail(c, FFI_INTERNAL, "no memory for messages of %zu bytes", stage_bytes);
  char *stage = composed ? c->messages : scratch->data;
  MPI_Request *requests = (MPI_Request *)(void *)(scratch->data + own_bytes);
  int begun = 0, next = 0, code = MPI_SUCCESS;
  for (; begun < plan->send_count && code == MPI_SUCCESS; begun++) {
    const struct peer *peer = &plan->sends[begun];
    if (!composed) next = plan_compose_until(c, plan, stage, next, peer->stage + peer->bytes);
    memcpy(stage + peer->stage, &label, LABEL_BYTES);
    struct span span = span_of_bytes(peer->bytes);
    code = span.code;
    if (code == MPI_SUCCESS)
      code = mpi.Isend(stage + peer->stage, span.count, span.type, peer->rank, plan->tag, comm, &requests[begun]);
    span_free(&span);
  }
  if (code != MPI_SUCCESS) begun--;
  c->sending = begun > 0;
  ffi_error *error = code == MPI_SUCCESS ? NULL : call_fail_mpi(c, code);
  if (!composed) {
    plan_compose_until(c, plan, stage, next, INT64_MAX);
    plan_fill(c, plan);
    plan_copy_pairs(c, plan);
  }
  /* Where this rank could not send, others may not have been able to either, and nothing may come. */
  if (code == MPI_SUCCESS) error = receive_all(c, plan, stage, label);
  c->sending = false;
  for (int i = 0; i < begun; i++) {
    MPI_Status sent;
    code = mpi.Wait(&requests[i], &sent);
    if (code != MPI_SUCCESS && error == NULL) error = call_fail_in(c, "MPI_Wait", code);
  }
  if (error != NULL && !composed) plan_spoil(c, plan);
  scratch_give(scratch);
  return error;
}

ffi_error *BODY(exchange)(struct call *c) { return by_plan(c); }

ffi_error *BODY(neighbor_allgather)(struct call *c) { return by_plan(c); }

ffi_error *BODY(neighbor_alltoall)(struct call *c) { return by_plan(c); }

ffi_error *BODY(index_accumulate)(struct call *c) { return by_plan(c); }

ffi_error *BODY(index_exchange)(struct call *c) { return by_plan(c); }

ffi_error *BODY(redistribute)(struct call *c) { return by_plan(c); }

int post_send(const struct call *call, intptr_t *request) {
  ARGUMENTS(send, (struct call *)(uintptr_t)call);
  MPI_Request made;
  struct span in = span_of(b.in->type, b.in->count);
  int code = in.code;
  if (code == MPI_SUCCESS) code = mpi.Isend(b.in->data, in.count, in.type, (int)a.dest, (int)a.tag, comm, &made);
  span_free(&in);
  if (code == MPI_SUCCESS) *request = (intptr_t)made;
  return code;
}

/* Until a message has left its buffer. */
ffi_error *BODY(complete)(struct call *c) {
  ARGUMENTS(complete, c);
  (void)b;
  MPI_Request request = (MPI_Request) * (intptr_t *)object_of(a.request);
  MPI_Status status;
  BEGIN(c, Wait, "-> %d with", (int)a.dest);
  TRY(c, mpi.Wait(&request, &status));
  return NULL;
}
