/* The bodies of the messages: between two ranks, and by plans. Compiled once per ABI. */
#include "mpi/bodies.h"

/* What is sent of a buffer: itself, or with JAXMPI_CHECK a copy behind a label. */
struct parcel {
  const void *data;
  struct span span;
  struct label *copy;
};

/* NULL: no label is wanted, or there is no memory for one; the message is then not checked. */
static struct label *copy_labelled(const struct call *call, const struct buffer *in) {
  if (!atomic_load_explicit(&runtime.labels, memory_order_relaxed)) return NULL;
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

/* Receiving. A message is matched first, and its size is compared with the template. A receive into a buffer that is
 * too small is an error by the standard, but where one process copies directly from the other's memory, Open MPI then
 * writes past the end of the buffer, and MPICH promises nothing better. Matching also gives both sizes for the error,
 * and a message that does not fit can be taken off the channel, so that the next one is not affected. It costs about
 * 0.04 us. */

/* Size of a matched message in elements of `type`; -1 if it is not a whole number of elements or not known. */
int64_t message_count(const MPI_Status *status, MPI_Datatype type) {
  MPI_Count large = ABI_UNDEFINED;
  int small = ABI_UNDEFINED;
  if (mpi.Get_count_c != NULL)
    mpi.Get_count_c(status, type, &large);
  else if (mpi.Get_count(status, type, &small) == MPI_SUCCESS && small != ABI_UNDEFINED)
    large = small;
  else if (mpi.Get_elements_x != NULL)
    mpi.Get_elements_x(status, type, &large);
  return large == ABI_UNDEFINED ? -1 : (int64_t)large;
}

/* Receives a matched message as bytes. Returns an MPI error code. */
static int take(MPI_Message *message, void *data, int64_t bytes, MPI_Status *status) {
  struct span span = span_of_bytes(bytes);
  int code = span.code == MPI_SUCCESS ? mpi.Mrecv(data, span.count, span.type, message, status) : span.code;
  span_free(&span);
  return code;
}

/* Receives a matched message of that many bytes and drops it. Returns an MPI error code, or NO_MEMORY: then the message
 * stays matched and is never received. */
int discard(MPI_Message *message, int64_t bytes) {
  void *scratch = bytes > 0 ? malloc((size_t)bytes) : NULL;
  if (bytes < 0 || (bytes > 0 && scratch == NULL)) return NO_MEMORY;
  MPI_Status ignored;
  int code = take(message, scratch, bytes, &ignored);
  free(scratch);
  return code;
}

/* The error for a message of `sent` bytes that does not fit the template; NULL if the last message of a pytree will
 * tell. `code`: of its removal from the channel; `by_status`: the user passes a status; `label`: NULL if it has none.
 */
static ffi_error *misfit(const struct call *call, const struct buffer *out, int64_t sent, const MPI_Status *status,
                         int code, bool by_status, const struct label *label) {
  int64_t width = (int64_t)out->type->bytes, expected = out->count * width;
  bool longer = sent > expected;
  const char *what = sent < 0 ? "has a size that MPI cannot tell" : longer ? "would be truncated" : "is too short";
  const char *then = code == MPI_SUCCESS ? "dropped" : "left unreceived, for it could not be taken off the channel";
  return call_fail_dropped(
      call, out,
      "the message from rank %d with tag %d%s%.200s has %" PRId64 " bytes (%" PRId64
      " elements of %s), the template %" PRId64 " bytes (%" PRId64
      " elements): it %s, so it was %s. Receive with a template of the shape and dtype that is sent%s",
      status->MPI_SOURCE, status->MPI_TAG, label != NULL && label->lines[0] != '\0' ? " " : "",
      label != NULL ? label->lines : "", sent, sent / width, out->type->name, expected, out->count, what, then,
      longer || by_status || call->operation->row == ROW_irecv
          ? ""
          : ", or pass status= to accept shorter ones (the rest is then zero)");
}

/* Drops a message that does not fit the template; returns the error. */
static ffi_error *reject(struct call *call, const struct buffer *out, MPI_Message *message, const MPI_Status *status,
                         bool by_status) {
  int64_t sent = message_count(status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
  int code = discard(message, sent);
  if (code != MPI_SUCCESS && code != NO_MEMORY) return call_fail_in(call, "MPI_Mrecv", code);
  return misfit(call, out, sent, status, code, by_status, NULL);
}

/* What remains once a message of `count` elements is in the template. */
static inline ffi_error *received(struct call *call, const struct buffer *out, int64_t count, const MPI_Status *status,
                                  MPI_Status *users) {
  if (users != NULL) *users = *status;
  if (count < out->count) /* a short message, or none (MPI_PROC_NULL): the rest is zero */
    return call_zero(call, buffer_at(out, count), (size_t)(out->count - count) * out->type->bytes);
  return NULL;
}

/* Puts a message, which has been received, into the template, if it is of its dtype and fits. */
static ffi_error *unpack(struct call *call, const struct buffer *out, const char *data, int64_t bytes,
                         MPI_Status *status, MPI_Status *users) {
  const struct label *label = label_find(data, bytes);
  int64_t width = (int64_t)out->type->bytes, room = out->count * width;
  const struct datatype *sent = label != NULL ? datatype_find((int)label->dtype) : NULL;
  if (label != NULL) data += sizeof *label, bytes -= (int64_t)sizeof *label;
  if (sent != NULL && sent != out->type) {
    return call_fail_dropped(call, out,
                             "the message from rank %d with tag %d%s%.200s is of %" PRId64
                             " %s, the template of %" PRId64
                             " %s, so it was dropped. Receive with a template of the shape and dtype that is sent",
                             status->MPI_SOURCE, status->MPI_TAG, label->lines[0] != '\0' ? " " : "", label->lines,
                             label->count, sent->name, out->count, out->type->name);
  }
  if (bytes > room || bytes % width != 0 || (bytes < room && users == NULL))
    return misfit(call, out, bytes, status, MPI_SUCCESS, users != NULL, label);
  if (bytes > 0) memcpy(out->data, data, (size_t)bytes);
  if (users != NULL && bytes > INT_MAX && mpi.Status_set_elements_x != NULL)
    TRY_MPI(call, Status_set_elements_x, status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8], (MPI_Count)bytes);
  else if (users != NULL && bytes <= INT_MAX)
    TRY_MPI(call, Status_set_elements, status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8], (int)bytes);
  return received(call, out, bytes / width, status, users);
}

ffi_error *unpack_labelled(struct call *call, const struct buffer *out, const char *data, int64_t bytes,
                           MPI_Status *status) {
  return unpack(call, out, data, bytes, status, NULL);
}

/* The same as `receive` of a message that may have a label. */
static ffi_error *receive_labelled(struct call *call, const struct buffer *out, MPI_Message *message,
                                   MPI_Status *status, MPI_Status *users) {
  int64_t bytes = message_count(status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
  char *data = bytes >= 0 ? malloc((size_t)bytes + 1) : NULL;
  if (data == NULL) return reject(call, out, message, status, users != NULL);
  int code = take(message, data, bytes, status);
  ffi_error *error =
      code == MPI_SUCCESS ? unpack(call, out, data, bytes, status, users) : call_fail_in(call, "MPI_Mrecv", code);
  free(data);
  return error;
}

/* Receives a matched message into `out`, as described by `span`; fills the user's status unless that is NULL. */
static inline ffi_error *receive_into(struct call *call, const struct buffer *out, const struct span *span,
                                      MPI_Message *message, MPI_Status *status, MPI_Status *users) {
  int units = 0;
  call->from = status->MPI_SOURCE;
  call->from_tag = status->MPI_TAG;
  TRY_MPI(call, Get_count, status, span->type, &units);
  bool nobody = status->MPI_SOURCE == ABI_PROC_NULL, fits = units == span->count || nobody;
  if (call->labelled && !nobody) return receive_labelled(call, out, message, status, users);
  int64_t count = nobody ? 0 : fits ? out->count : message_count(status, element(out->type));
  if (!fits && (users == NULL || count < 0 || count > out->count))
    return reject(call, out, message, status, users != NULL);
  TRY_MPI(call, Mrecv, out->data, span->count, span->type, message, status);
  return received(call, out, count, status, users);
}

ffi_error *receive_matched(struct call *call, const struct buffer *out, MPI_Message *message, MPI_Status *status) {
  struct span span = span_of(out->type, out->count);
  if (span.code != MPI_SUCCESS) {
    discard(message, message_count(status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]));
    return call_fail_mpi(call, span.code);
  }
  ffi_error *error = receive_into(call, out, &span, message, status, NULL);
  span_free(&span);
  return error;
}

/* `deadline`: 0, or until when the message is to be matched; `late`: that is over. */
static inline ffi_error *receive(struct call *call, const struct buffer *out, const struct span *span, int source,
                                 int tag, MPI_Status *users, double deadline, bool *late) {
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
  ffi_error *error = receive(c, b.out, &out, (int)a.source, (int)a.tag, object_of(a.status), deadline, &late);
  span_free(&out);
  return error;
}

/* What sendrecv does until a deadline. Its own message is sent from memory of a request, and may be under way for
 * longer than the call. */
static __attribute__((noinline)) ffi_error *sendrecv_in_time(struct call *c, double deadline) {
  ARGUMENTS(sendrecv, c);
  float numbers[2];
  const struct buffer id = {numbers, 2, datatype_find(FFI_DTYPE_F32), HOST_WRITE};
  struct parcel in = parcel_of(c, b.in);
  struct span out = span_of(b.out->type, b.out->count);
  size_t bytes = buffer_bytes(b.in) + (in.copy != NULL ? sizeof *in.copy : 0);
  struct request *request = NULL;
  MPI_Request made;
  MPI_Status sent;
  bool late = false;
  ffi_error *error = request_new(c, &id, bytes + 1, 1, 0, &request);
  int code = in.span.code != MPI_SUCCESS ? in.span.code : out.code;
  if (error == NULL && bytes > 0) memcpy(request->data, in.data, bytes);
  c->function = "MPI_Isend";
  if (error == NULL && code == MPI_SUCCESS)
    code = mpi.Isend(request->data, in.span.count, in.span.type, (int)a.dest, (int)a.sendtag, comm, &made);
  bool sending = c->sending = error == NULL && code == MPI_SUCCESS;
  if (sending) {
    request->handles[request->handle_count++] = (intptr_t)made;
    error = receive(c, b.out, &out, (int)a.source, (int)a.recvtag, object_of(a.status), deadline, &late);
  }
  c->sending = false;
  if (late) request_leave(request, (int64_t)bytes);
  if (sending && !late) code = mpi.Wait(&made, &sent);
  if (request != NULL && !late) request_end(request);
  parcel_free(&in);
  span_free(&out);
  if (sending) c->function = "MPI_Wait";
  return error != NULL || code == MPI_SUCCESS ? error : call_fail_mpi(c, code);
}

/* in: any shape  out: the template's shape */
ffi_error *BODY(sendrecv)(struct call *c) {
  ARGUMENTS(sendrecv, c);
  PASS(check_adjoint(c, ROW_isend, a.dest, a.sendtag));
  PASS(check_adjoint(c, ROW_irecv, a.source, a.recvtag));
  BEGIN(c, Sendrecv, "<- %d with tag %d -> %d with tag %d and", (int)a.source, (int)a.recvtag, (int)a.dest,
        (int)a.sendtag);
  double deadline = deadlines_on() ? deadline_of_receive(c) : 0;
  if (deadline > 0) return sendrecv_in_time(c, deadline);
  struct parcel in = parcel_of(c, b.in);
  struct span out = span_of(b.out->type, b.out->count);
  MPI_Request request;
  ffi_error *error = NULL;
  int code = in.span.code != MPI_SUCCESS ? in.span.code : out.code;
  if (code == MPI_SUCCESS) {
    c->function = "MPI_Isend";
    code = mpi.Isend(in.data, in.span.count, in.span.type, (int)a.dest, (int)a.sendtag, comm, &request);
  }
  if (code == MPI_SUCCESS) {
    c->sending = true;
    bool late;
    error = receive(c, b.out, &out, (int)a.source, (int)a.recvtag, object_of(a.status), 0, &late);
    MPI_Status sent; /* completed after an error too, so that this rank's message arrives */
    c->sending = false;
    code = mpi.Wait(&request, &sent);
    c->function = code == MPI_SUCCESS ? "MPI_Sendrecv" : "MPI_Wait";
  }
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
  int64_t bytes = message_count(&status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
  int code;
  if (bytes == peer->bytes) {
    code = take(&message, stage + peer->stage, bytes, &status);
    memcpy(&label, stage + peer->stage, LABEL_BYTES);
  } else {
    code = discard(&message, bytes);
  }
  if (code == NO_MEMORY) return call_fail(c, FFI_INTERNAL, "no memory for a message of %" PRId64 " bytes", bytes);
  if (code != MPI_SUCCESS) return call_fail_in(c, "MPI_Mrecv", code);
  return label == expected ? NULL : fail_planned(c, peer, bytes);
}

ffi_error *fail_planned(const struct call *c, const struct peer *peer, int64_t bytes) {
  return call_fail(
      c, FFI_FAILED_PRECONDITION,
      "rank %d has sent something else (%" PRId64 " bytes, where %" PRId64
      " of this call were expected). All ranks must make the same calls in the same order: with arrays of the same "
      "dtypes, of one and the same global shape each, and the same arguments. JAXMPI_CHECK=1 tells where "
      "they differ, before anything is sent",
      peer->rank, bytes, peer->bytes);
}

/* What the plan says. */
static ffi_error *by_plan(struct call *c) {
  MPI_Comm comm = (MPI_Comm)c->comm->handle;
  const struct plan *plan = plan_of(c);
  PASS(plan_check(c, plan));
  BEGIN(c, Isend, "to %d ranks and from %d with", plan->send_count, plan->receive_count);
  uint64_t label = plan_label(c, plan, atomic_fetch_add(&c->comm->planned, 1) + 1);
  size_t stage_bytes = (size_t)(plan->sent + plan->received);
  size_t own_bytes = c->messages == NULL ? stage_bytes : 0;
  struct scratch *scratch = scratch_take(own_bytes + (size_t)plan->send_count * sizeof(MPI_Request));
  if (scratch == NULL) return call_fail(c, FFI_INTERNAL, "no memory for messages of %zu bytes", stage_bytes);
  char *stage = c->messages == NULL ? scratch->data : c->messages;
  MPI_Request *requests = (MPI_Request *)(void *)(scratch->data + own_bytes);
  if (c->messages == NULL) plan_pack(c, plan, stage);
  for (int i = 0; i < plan->send_count; i++) memcpy(stage + plan->sends[i].stage, &label, LABEL_BYTES);
  int begun = 0, code = MPI_SUCCESS;
  for (; begun < plan->send_count && code == MPI_SUCCESS; begun++) {
    const struct peer *peer = &plan->sends[begun];
    struct span span = span_of_bytes(peer->bytes);
    code = span.code;
    if (code == MPI_SUCCESS)
      code = mpi.Isend(stage + peer->stage, span.count, span.type, peer->rank, plan->tag, comm, &requests[begun]);
    span_free(&span);
  }
  if (code != MPI_SUCCESS) begun--;
  c->sending = begun > 0;
  ffi_error *error = code == MPI_SUCCESS ? NULL : call_fail_mpi(c, code);
  /* All of them, so that none is left to the next call; but where this rank could not send, others may not have been
   * able to either, and nothing may come. */
  for (int i = 0; i < plan->receive_count && code == MPI_SUCCESS; i++)
    error = call_first(c, error, receive_planned(c, plan, &plan->receives[i], stage, label));
  c->sending = false;
  for (int i = 0; i < begun; i++) {
    MPI_Status sent;
    code = mpi.Wait(&requests[i], &sent);
    if (code != MPI_SUCCESS && error == NULL) error = call_fail_in(c, "MPI_Wait", code);
  }
  if (error == NULL && c->messages == NULL) plan_unpack(c, plan, stage);
  scratch_give(scratch);
  return error;
}

ffi_error *BODY(exchange)(struct call *c) { return by_plan(c); }
ffi_error *BODY(neighbor_allgather)(struct call *c) { return by_plan(c); }
ffi_error *BODY(neighbor_alltoall)(struct call *c) { return by_plan(c); }
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
