#include "mpi/messages.h"

#include "mpi/match.h"

/* What is sent for a buffer: the buffer itself, or with JAXMPI_CHECK a copy behind a label. */
struct parcel {
  const void *data;
  struct span span;
  struct label *copy;
};

/* NULL: there is no memory for the label. Then the message is not checked. */
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

/* Check an adjoint against the adjoints that have been started. `row`: the operation that starts these adjoints. */
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

static inline ffi_error *match_and_receive(struct call *call, const struct buffer *out, const struct span *span,
                                           int source, int tag, MPI_Status *users) {
  MPI_Message message;
  MPI_Status status;
  PASS(await_message(call, source, tag, &message, &status));
  return receive_into(call, out, span, &message, &status, users);
}

/* out: the template's shape */
ffi_error *BODY(recv)(struct call *c) {
  ARGUMENTS(recv, c);
  PASS(check_adjoint(c, ROW_irecv, a.source, a.tag));
  BEGIN(c, Recv, "<- %d with tag %d and", (int)a.source, (int)a.tag);
  struct span out = span_of(b.out->type, b.out->count);
  TRY(c, out.code);
  ffi_error *error = match_and_receive(c, b.out, &out, (int)a.source, (int)a.tag, object_of(a.status));
  span_free(&out);
  return error;
}

/* in: any shape  out: the template's shape */
ffi_error *BODY(sendrecv)(struct call *c) {
  ARGUMENTS(sendrecv, c);
  PASS(check_adjoint(c, ROW_isend, a.dest, a.sendtag));
  PASS(check_adjoint(c, ROW_irecv, a.source, a.recvtag));
  BEGIN(c, Sendrecv, "<- %d with tag %d -> %d with tag %d and", (int)a.source, (int)a.recvtag, (int)a.dest,
        (int)a.sendtag);
  struct parcel in = parcel_of(c, b.in);
  struct span out = span_of(b.out->type, b.out->count);
  MPI_Request sent;
  int code = in.span.code != MPI_SUCCESS ? in.span.code : out.code;
  ffi_error *error = NULL;
  if (code == MPI_SUCCESS) {
    c->function = "MPI_Isend";
    code = mpi.Isend(in.data, in.span.count, in.span.type, (int)a.dest, (int)a.sendtag, comm, &sent);
  }
  if (code == MPI_SUCCESS) {
    c->sending = true;
    error = match_and_receive(c, b.out, &out, (int)a.source, (int)a.recvtag, object_of(a.status));
    c->sending = false;
    MPI_Status ignored; /* completed after an error too, so that this rank's message arrives */
    code = mpi.Wait(&sent, &ignored);
    c->function = code == MPI_SUCCESS ? "MPI_Sendrecv" : "MPI_Wait";
  }
  parcel_free(&in);
  span_free(&out);
  return error != NULL || code == MPI_SUCCESS ? error : call_fail_mpi(c, code);
}

/* --- messages of plans --- */

/* The notices of a call's peers. Each is received at the place of the peer's message in the stage.
 *
 * Before the call sends anything, it posts receives for the notices of the first AHEAD peers, and then one more for
 * each notice that has come. It does not if the queue keeps the order of messages, or if the stage is the transport's.
 * The memory for one notice overlaps the memory for the next ones: MPI writes only as many bytes as have come. A wrong
 * notice may be longer than the message of its peer. It then overwrites what lies behind, which is not used, because
 * the call fails. Behind the last message is room for NOTICE_BYTES. */
enum { AHEAD = 8 };
struct notices {
  struct call *call;
  const struct plan *plan;
  uint64_t label;
  char *stage;
  int expected;      /* peers for whose notices receives are posted or done; 0: all notices are matched */
  bool stage_in_use; /* MPI may write into the stage for ever */
  MPI_Request requests[AHEAD];
};

/* Return the place for the notice of a peer. It contains another label until the notice comes. */
static char *prepare_place(const struct notices *notices, const struct peer *peer) {
  char *place = notices->stage + peer->stage;
  label_put(place, ~label_to(peer, notices->label));
  return place;
}

/* Post receives for the notices of further peers, up to `count`. Return an MPI error code. */
static int expect_notices(struct notices *notices, int count) {
  MPI_Comm comm = handle_of_comm(notices->call->comm);
  for (int i; (i = notices->expected) < count && i < notices->plan->receive_count; notices->expected++) {
    const struct peer *peer = &notices->plan->receives[i];
    int code = mpi.Irecv(prepare_place(notices, peer), NOTICE_BYTES, bytes_type(), peer->rank, notices_tag(), comm,
                         &notices->requests[i % AHEAD]);
    if (code != MPI_SUCCESS) return code;
  }
  return MPI_SUCCESS;
}

/* Cancel the receive of a notice, so that MPI no longer writes into the stage for this peer. */
static void cancel_notice(struct notices *notices, int i) {
  MPI_Status ignored;
  MPI_Request *request = &notices->requests[i % AHEAD];
  if (mpi.Cancel(request) == MPI_SUCCESS)
    mpi.Wait(request, &ignored);
  else
    notices->stage_in_use = true;
}

/* Receive a message that has been matched. `data`: room for it, or NULL, to drop it. */
static ffi_error *take_matched(struct call *c, MPI_Message *message, MPI_Status *status, char *data, int64_t bytes) {
  int code = data != NULL ? receive_bytes(message, data, bytes, status) : message_discard(message, bytes);
  if (code == CODE_NO_MEMORY) return call_fail(c, FFI_INTERNAL, "no memory for a message of %" PRId64 " bytes", bytes);
  return code == MPI_SUCCESS ? NULL : call_fail_in(c, "MPI_Mrecv", code);
}

/* Wait for the notice of a peer, which is then in the stage. If it is too long, the stage contains another label. */
static ffi_error *await_notice(struct notices *notices, int i, MPI_Status *status) {
  struct call *c = notices->call;
  if (i < notices->expected) {
    MPI_Request *request = &notices->requests[i % AHEAD], before = *request;
    int code = mpi.Wait(request, status);
    if (code == MPI_SUCCESS) return NULL;
    if (*request == before) cancel_notice(notices, i);
    return call_fail_in(c, "MPI_Wait", code);
  }
  const struct peer *peer = &notices->plan->receives[i];
  MPI_Message message;
  char *place = prepare_place(notices, peer);
  PASS(await_message(c, peer->rank, notices_tag(), &message, status));
  int64_t bytes = message_bytes(status);
  return take_matched(c, &message, status, bytes < 0 || bytes > peer->bytes ? NULL : place, bytes);
}

ffi_error *take_announced(struct call *c, const struct peer *peer, char *stage, int64_t *bytes, uint64_t *label) {
  MPI_Message message;
  MPI_Status status;
  PASS(await_message(c, peer->rank, plans_tag(), &message, &status));
  *bytes = message_bytes(&status);
  char *data = *bytes == peer->bytes && stage != NULL ? stage + peer->stage : NULL;
  PASS(take_matched(c, &message, &status, data, *bytes));
  if (data != NULL) memcpy(label, data, LABEL_BYTES);
  return NULL;
}

/* Receive the message of a peer into the stage, if it is the expected one; otherwise drop it. */
static ffi_error *receive_planned(struct notices *notices, int i) {
  struct call *c = notices->call;
  const struct peer *peer = &notices->plan->receives[i];
  const uint64_t expected = label_to(peer, notices->label);
  uint64_t label;
  MPI_Status status;
  PASS(await_notice(notices, i, &status));
  memcpy(&label, notices->stage + peer->stage, LABEL_BYTES);
  int64_t bytes = message_bytes(&status);
  if (label == expected && bytes == peer->bytes) return NULL;
  bool of_this_call = label == expected;
  label = ~expected;
  bool announced = bytes == LABEL_BYTES;
  while (announced) {
    PASS(take_announced(c, peer, of_this_call ? notices->stage : NULL, &bytes, &label));
    announced = of_this_call && label != expected; /* drop what an error has left: the right message follows */
  }
  return label == expected ? NULL : fail_planned(c, peer, bytes);
}

/* Receive all messages, so that none is left to the next call, and unpack them. It unpacks each message when it has
 * come. If one wrong message must not change the results, it unpacks all of them at the end. */
static ffi_error *receive_all(struct notices *notices) {
  struct call *c = notices->call;
  char *stage = notices->stage;
  const struct plan *plan = notices->plan;
  ffi_error *error = NULL;
  bool at_once = is_unpacked_at_once(plan);
  int next = 0;
  for (int i = 0; i < plan->receive_count; i++) {
    const struct peer *peer = &plan->receives[i];
    error = call_first(c, error, receive_planned(notices, i));
    if (notices->expected == i + AHEAD && !is_in_order_of_queue(c->comm)) { /* a request is free */
      int code = expect_notices(notices, i + 1 + AHEAD);
      if (code != MPI_SUCCESS) error = call_first(c, error, call_fail_in(c, "MPI_Irecv", code));
    }
    if (at_once && error == NULL) next = plan_unpack_until(c, plan, stage, next, peer->stage + peer->bytes);
  }
  if (error != NULL) return error;
  if (at_once)
    plan_unpack_until(c, plan, stage, next, INT64_MAX);
  else
    plan_unpack(c, plan, stage);
  return NULL;
}

static int send_bytes(struct departures *sent, const char *data, int64_t bytes, int rank, int tag) {
  struct span span = span_of_bytes(bytes);
  int code = span.code;
  if (code == MPI_SUCCESS) {
    MPI_Request handle;
    code = mpi.Isend(data, span.count, span.type, rank, tag, handle_of_comm(sent->call->comm), &handle);
    if (code == MPI_SUCCESS) sent->handles[sent->count++] = (intptr_t)handle;
  }
  span_free(&span);
  sent->call->sending = sent->count > 0;
  return code;
}

/* Label the message to a peer, and send the notice if the notice is not the message itself. The rest of the message may
 * be composed later. Return an MPI error code. */
static int announce_message(struct departures *sent, const struct peer *peer, char *message, uint64_t label) {
  label_put(message, label_to(peer, label));
  return is_announced(peer) ? send_bytes(sent, message, LABEL_BYTES, peer->rank, notices_tag()) : MPI_SUCCESS;
}

int send_planned(struct departures *sent, const struct plan *plan, char *stage, uint64_t label, int *next) {
  struct call *c = sent->call;
  int code = MPI_SUCCESS;
  for (int i = 0; i < plan->send_count && code == MPI_SUCCESS; i++) {
    const struct peer *peer = &plan->sends[i];
    char *message = stage + peer->stage;
    code = announce_message(sent, peer, message, label);
    *next = plan_compose_message(c, plan, stage, i, *next);
    int tag = is_announced(peer) ? plans_tag() : notices_tag();
    if (code == MPI_SUCCESS) code = send_bytes(sent, message, peer->bytes, peer->rank, tag);
  }
  return code;
}

/* Communicates by the plan of the call. */
ffi_error *BODY(exchange)(struct call *c) {
  const struct plan *plan = plan_of(c);
  PASS(plan_check(c, plan, true, true));
  BEGIN(c, Isend, "to %d ranks and from %d with", plan->send_count, plan->receive_count);
  uint64_t label = plan_label(c, plan, atomic_fetch_add(&c->comm->planned, 1) + 1);
  size_t bytes = is_of_messages(plan) ? 0 : (size_t)(plan->sent + plan->received) + NOTICE_BYTES;
  size_t handles = (bytes + sizeof(intptr_t) - 1) / sizeof(intptr_t);
  size_t sends = (size_t)(plan->send_count + plan->announced_sends);
  struct scratch *scratch = scratch_take((handles + sends) * sizeof(intptr_t));
  if (scratch == NULL)
    return call_fail(c, FFI_INTERNAL, "no memory for messages of %" PRId64 " bytes", plan->sent + plan->received);
  char *stage = is_of_messages(plan) ? plan_operand(c, 0)->data : scratch->data, *received = stage;
  if (is_of_messages(plan) && plan->receive_count > 0) received = (char *)plan_result(c, 0)->data - plan->sent;
  struct notices notices = {.call = c, .plan = plan, .label = label, .stage = received};
  struct departures sent = {.call = c, .handles = (intptr_t *)(void *)scratch->data + handles};
  int next = 0, code = MPI_SUCCESS;
  ffi_error *error = NULL;
  if (!is_of_messages(plan) && !is_in_order_of_queue(c->comm)) code = expect_notices(&notices, AHEAD);
  if (code != MPI_SUCCESS) error = call_fail_in(c, "MPI_Irecv", code); /* messages are matched all the same */
  code = send_planned(&sent, plan, stage, label, &next);
  if (code != MPI_SUCCESS) error = call_first(c, error, call_fail_in(c, "MPI_Isend", code));
  plan_compose_rest(c, plan, stage, next, false);
  plan_fill(c, plan);
  plan_copy_pairs(c, plan);
  /* If this rank could not send, other ranks may not have been able to either, and nothing may come. */
  if (code == MPI_SUCCESS) error = call_first(c, error, receive_all(&notices));
  for (int i = 0; i < notices.expected && code != MPI_SUCCESS; i++) cancel_notice(&notices, i);
  c->sending = false;
  for (int i = 0; i < sent.count; i++) {
    MPI_Request request = (MPI_Request)sent.handles[i];
    MPI_Status ignored;
    int wait_code = mpi.Wait(&request, &ignored);
    if (wait_code != MPI_SUCCESS && error == NULL) error = call_fail_in(c, "MPI_Wait", wait_code);
  }
  if (error != NULL) plan_spoil(c, plan);
  if (!notices.stage_in_use) scratch_give(scratch);
  return error;
}

int post_send(const struct call *call, intptr_t *request) {
  ARGUMENTS(send, (struct call *)(uintptr_t)call);
  MPI_Request handle;
  struct span in = span_of(b.in->type, b.in->count);
  int code = in.code;
  if (code == MPI_SUCCESS) code = mpi.Isend(b.in->data, in.count, in.type, (int)a.dest, (int)a.tag, comm, &handle);
  span_free(&in);
  if (code == MPI_SUCCESS) *request = (intptr_t)handle;
  return code;
}

/* Wait until MPI no longer reads the buffer of a message. */
ffi_error *BODY(complete)(struct call *c) {
  ARGUMENTS(complete, c);
  (void)b;
  MPI_Request request = (MPI_Request) * (intptr_t *)object_of(a.request);
  MPI_Status status;
  BEGIN(c, Wait, "-> %d with", (int)a.dest);
  TRY(c, mpi.Wait(&request, &status));
  return NULL;
}
