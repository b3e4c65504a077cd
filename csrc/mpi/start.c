/* The bodies that start operations: see requests/table.h. Compiled once per ABI. */
#include "mpi/match.h"
#include "mpi/messages.h"

/* End a request that MPI could not start completely. Return the error. */
static ffi_error *fail_start(struct call *c, struct request *request, int code) {
  ffi_error *error = call_fail_mpi(c, code);
  complete_handles(request);
  request_end(request);
  return error;
}

/* Begin a request: it can be waited for from now on. `moved`: bytes under way. */
static ffi_error *begin_request(struct call *c, struct request *request, const struct buffer *id, int64_t moved) {
  request_begin(request, id, moved);
  c->timeline.request = request_number(request);
  return NULL;
}

/* Note the operation that a call of MPI has started. Return the error for `code`, or NULL. */
static ffi_error *begin_with(struct call *c, struct request *request, int code, MPI_Request handle) {
  if (code != MPI_SUCCESS) return fail_start(c, request, code);
  request->handles[request->handle_count++] = (intptr_t)handle;
  return NULL;
}

/* Starts an operation by one call of MPI on a span, frees the span, and begins the request. */
#define BEGIN_WITH(call, request, id, span, moved, expression) \
  do {                                                         \
    MPI_Request handle;                                        \
    int code_ = (span).code;                                   \
    if (code_ == MPI_SUCCESS) code_ = (expression);            \
    span_free(&(span));                                        \
    PASS(begin_with(call, request, code_, handle));            \
    return begin_request(call, request, id, moved);            \
  } while (0)

/* Make a request with a copy of `in`. The copy becomes the result. */
static ffi_error *request_with_copy(struct call *c, const struct buffer *id, const struct buffer *in, size_t more,
                                    int handles, struct request **request_out) {
  PASS(request_new(c, id, buffer_bytes(in) + more + 1, handles, 0, request_out));
  struct request *request = *request_out;
  if (in->count > 0) memcpy(request->data, in->data, buffer_bytes(in));
  request->type = in->type, request->count = in->count, request->result = request->data;
  return NULL;
}

static int chunk_count(int64_t count) {
  return (int)((count + runtime.max_count - 1) / runtime.max_count) + (count == 0);
}

ffi_error *BODY(hold)(struct call *c) {
  ARGUMENTS(hold, c);
  (void)a;
  struct request *request;
  PASS(request_with_copy(c, b.request, b.in, 0, 0, &request));
  return begin_request(c, request, b.request, 0);
}

ffi_error *BODY(iallreduce)(struct call *c) {
  ARGUMENTS(iallreduce, c);
  BEGIN(c, Iallreduce, "with %" PRId64 " items and", b.in->count);
  struct request *request;
  PASS(request_with_copy(c, b.request, b.in, 0, chunk_count(b.in->count), &request));
  FOR_CHUNKS(c, b.in->count, i, n) {
    MPI_Request handle;
    void *data = request->data + (size_t)i * b.in->type->bytes;
    int code = mpi.Iallreduce(ABI_IN_PLACE, data, (int)n, element(b.in->type), handle_of(a.op), comm, &handle);
    PASS(begin_with(c, request, code, handle));
  }
  return begin_request(c, request, b.request, (int64_t)buffer_bytes(b.in));
}

/* The result of ranks other than root is zero. */
ffi_error *BODY(ireduce)(struct call *c) {
  ARGUMENTS(ireduce, c);
  BEGIN(c, Ireduce, "-> %d with %" PRId64 " items and", (int)a.root, b.in->count);
  bool root = c->comm->rank == a.root;
  size_t bytes = buffer_bytes(b.in);
  struct request *request;
  PASS(request_with_copy(c, b.request, b.in, root ? 0 : bytes, chunk_count(b.in->count), &request));
  if (!root) memset(request->result = request->data + bytes, 0, bytes);
  FOR_CHUNKS(c, b.in->count, i, n) {
    MPI_Request handle;
    void *data = request->data + (size_t)i * b.in->type->bytes;
    int code = mpi.Ireduce(root ? ABI_IN_PLACE : data, root ? data : NULL, (int)n, element(b.in->type), handle_of(a.op),
                           (int)a.root, comm, &handle);
    PASS(begin_with(c, request, code, handle));
  }
  return begin_request(c, request, b.request, (int64_t)bytes);
}

ffi_error *BODY(ialltoall)(struct call *c) {
  ARGUMENTS(ialltoall, c);
  (void)a;
  BEGIN(c, Ialltoall, "with %" PRId64 " items and", b.in->count);
  size_t bytes = buffer_bytes(b.in);
  struct request *request;
  PASS(request_with_copy(c, b.request, b.in, bytes, 1, &request));
  request->result = request->data + bytes;
  struct span s = span_of(b.in->type, b.in->count / c->comm->size);
  BEGIN_WITH(c, request, b.request, s, (int64_t)bytes,
             mpi.Ialltoall(request->data, s.count, s.type, request->result, s.count, s.type, comm, &handle));
}

ffi_error *BODY(ibarrier)(struct call *c) {
  ARGUMENTS(ibarrier, c);
  (void)a;
  BEGIN(c, Ibarrier, "with");
  struct request *request;
  PASS(request_new(c, b.request, 0, 1, 0, &request));
  MPI_Request handle;
  int code = mpi.Ibarrier(comm, &handle);
  PASS(begin_with(c, request, code, handle));
  return begin_request(c, request, b.request, 0);
}

/* in: on root only */
ffi_error *BODY(ibcast)(struct call *c) {
  ARGUMENTS(ibcast, c);
  bool root = c->comm->rank == a.root;
  if (root) NEEDS(c, b.in);
  struct buffer data = {root ? b.in->data : NULL, a.count, datatype_find((int)a.dtype), ROLE_READ};
  if (data.type == NULL || a.count < 0 || (root && (b.in->count != a.count || b.in->type != data.type)))
    return call_fail(c, FFI_INTERNAL, "an array of another shape: reinstall jaxmpi");
  BEGIN(c, Ibcast, "from %d with %" PRId64 " items and", (int)a.root, a.count);
  struct request *request;
  PASS(request_new(c, b.request, buffer_bytes(&data) + 1, 1, 0, &request));
  if (root && a.count > 0) memcpy(request->data, data.data, buffer_bytes(&data));
  request->type = data.type, request->count = a.count, request->result = request->data;
  struct span s = span_of(data.type, a.count);
  BEGIN_WITH(c, request, b.request, s, (int64_t)buffer_bytes(&data),
             mpi.Ibcast(request->data, s.count, s.type, (int)a.root, comm, &handle));
}

ffi_error *BODY(isend)(struct call *c) {
  ARGUMENTS(isend, c);
  BEGIN(c, Isend, "-> %d with tag %d and", (int)a.dest, (int)a.tag);
  size_t front = c->labelled ? sizeof(struct label) : 0, bytes = front + buffer_bytes(b.in);
  struct request *request;
  PASS(request_new(c, b.request, bytes + 1, 1, 0, &request));
  if (c->labelled) {
    struct label label = label_of(c, b.in);
    memcpy(request->data, &label, sizeof label);
  }
  if (b.in->count > 0) memcpy(request->data + front, b.in->data, buffer_bytes(b.in));
  struct span s = c->labelled ? span_of_bytes((int64_t)bytes) : span_of(b.in->type, b.in->count);
  BEGIN_WITH(c, request, b.request, s, (int64_t)bytes,
             mpi.Isend(request->data, s.count, s.type, (int)a.dest, (int)a.tag, comm, &handle));
}

static ffi_error *need_threads(const struct call *c) {
  if (!runtime.serialize) return NULL;
  return call_fail(c, FFI_UNIMPLEMENTED,
                   "this needs MPI_THREAD_MULTIPLE, because a background thread receives the messages. Leave "
                   "mpi4py.rc.thread_level at 'multiple', or receive with recv. Nothing was sent");
}

static void receive_init(struct receive *receive, struct communicator *comm, int source, int tag, int64_t bytes) {
  *receive = (struct receive){.comm = comm, .source = source, .tag = tag, .bytes = bytes};
}

ffi_error *BODY(irecv)(struct call *c) {
  ARGUMENTS(irecv, c);
  const struct datatype *type = datatype_find((int)a.dtype);
  PASS(need_threads(c));
  if (type == NULL || a.count < 0) return call_fail(c, FFI_INTERNAL, "an array of another dtype: reinstall jaxmpi");
  BEGIN(c, Irecv, "<- %d with tag %d and", (int)a.source, (int)a.tag);
  struct request *request;
  PASS(request_new(c, b.request, 0, 0, 1, &request));
  int64_t bytes = a.count * (int64_t)type->bytes;
  request->type = type, request->count = a.count;
  receive_init(&request->receives[0], c->comm, (int)a.source, (int)a.tag, bytes);
  request->receives[0].request = request;
  return begin_request(c, request, b.request, bytes);
}

/* Fills in the receives of a plan's notices, and behind them the receives of the messages that notices announce.
 * `labels`: memory for these notices. */
static void expect_messages(struct call *c, struct request *request, const struct plan *plan, char *labels) {
  struct receive *announced = &request->receives[plan->receive_count];
  for (int i = 0; i < plan->receive_count; i++) {
    const struct peer *peer = &plan->receives[i];
    struct receive *notice = &request->receives[i];
    receive_init(notice, c->comm, peer->rank, notices_tag(), is_announced(peer) ? LABEL_BYTES : peer->bytes);
    notice->memory = is_announced(peer) ? labels : request->data + peer->stage;
    if (!is_announced(peer)) continue;
    labels += LABEL_BYTES;
    receive_init(announced, c->comm, peer->rank, plans_tag(), peer->bytes);
    announced++->memory = request->data + peer->stage;
  }
}

/* Start the messages of a plan: send them, and post the receives. */
ffi_error *BODY(exchange_start)(struct call *c) {
  ARGUMENTS(exchange_start, c);
  const struct plan *plan = object_of(a.plan);
  PASS(need_threads(c));
  BEGIN(c, Isend, "to %d ranks and from %d with", plan->send_count, plan->receive_count);
  PASS(plan_check(c, plan, true, false));
  size_t bytes = (size_t)(plan->sent + plan->received), labels = LABEL_BYTES * (size_t)plan->announced_receives;
  int handles = plan->send_count + plan->announced_sends, receives = plan->receive_count + plan->announced_receives;
  struct request *request;
  PASS(request_new(c, b.request, bytes + labels + 1, handles, receives, &request));
  request->label = plan_label(c, plan, atomic_fetch_add(&c->comm->planned, 1) + 1);
  expect_messages(c, request, plan, request->data + bytes);
  if (is_of_messages(plan) && plan->sent > 0) memcpy(request->data, plan_operand(c, 0)->data, (size_t)plan->sent);
  struct departures sent = {.call = c, .handles = request->handles};
  int next = 0, code = send_planned(&sent, plan, request->data, request->label, &next);
  request->handle_count = sent.count;
  if (code != MPI_SUCCESS) return fail_start(c, request, code);
  plan_compose_rest(c, plan, request->data, next, true);
  c->sending = false;
  return begin_request(c, request, b.request, (int64_t)bytes);
}
