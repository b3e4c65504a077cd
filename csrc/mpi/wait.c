/* The bodies that wait for requests. Compiled once per ABI. */
#include <sched.h>

#include "execute/agreement.h"
#include "mpi/match.h"
#include "mpi/messages.h"
#include "observe/timeline.h"
#include "observe/watchdog.h"

static ffi_error *fail_noted(struct call *c, const struct request *request) {
  return request->code == MPI_SUCCESS ? NULL : call_fail_in(c, request->function, request->code);
}

static int64_t bytes_of(struct receive *receive) { return message_bytes(status_of(receive)); }

static ffi_error *fail_forgotten(const struct call *c) {
  return call_fail(c, FFI_FAILED_PRECONDITION,
                   "the communicator was freed before the message came, so nothing receives it any more. Wait first");
}

/* Finish an irecv. */
static ffi_error *finish_receive(struct call *c, struct request *request, const struct buffer *out) {
  struct receive *receive = &request->receives[0];
  MPI_Message message;
  MPI_Status status;
  if (receive->source == ABI_PROC_NULL) return call_zero(c, out->data, buffer_bytes(out));
  if (receive->exclusive) { /* no other thread polls for messages */
    TRY_MPI(c, Mprobe, receive->source, receive->tag, handle_of_comm(c->comm), &message, &status);
    if (receive_accepts(receive, status.MPI_TAG)) return receive_matched(c, out, &message, &status);
    PASS(add_unexpected(c, message, &status));
  }
  bool received = complete_receive(request, receive);
  PASS(fail_noted(c, request));
  if (!received) return fail_forgotten(c);
  if (receive->state == RECEIVE_MATCHED) {
    message = (MPI_Message)receive->info.handle;
    return receive_matched(c, out, &message, status_of(receive));
  }
  c->timeline.from = status_of(receive)->MPI_SOURCE;
  c->timeline.tag = status_of(receive)->MPI_TAG;
  if (has_labels()) return receive_from_memory(c, out, receive->memory, bytes_of(receive), status_of(receive), NULL);
  if (out->count > 0) memcpy(out->data, receive->memory, buffer_bytes(out));
  return NULL;
}

/* Receive a matched message into the memory of the receive, or drop it if the size is another. */
static void take_planned(struct request *request, struct receive *receive, int64_t bytes) {
  MPI_Message message = (MPI_Message)receive->info.handle;
  int code = bytes == receive->bytes ? receive_bytes(&message, receive->memory, bytes, status_of(receive))
                                     : message_discard(&message, bytes);
  note_code(request, "MPI_Mrecv", code);
}

/* Receive one message of a plan. Return whether it is the expected one. `bytes`: how many bytes it has, -1 if it will
 * never come. */
static bool finish_message(struct request *request, struct receive *receive, uint64_t expected, int64_t *bytes) {
  uint64_t label = ~expected;
  *bytes = complete_receive(request, receive) ? bytes_of(receive) : -1;
  if (*bytes >= 0 && receive->state == RECEIVE_MATCHED) take_planned(request, receive, *bytes);
  if (*bytes == receive->bytes) memcpy(&label, receive->memory, LABEL_BYTES);
  return label == expected;
}

/* Receive the notice of a peer, and the message that the notice announces. `announced`: the receive for this message;
 * NULL: the plan expects none. The rest is as in finish_message. */
static ffi_error *finish_peer(struct call *c, struct request *request, const struct peer *peer, struct receive *notice,
                              struct receive *announced, int64_t *bytes, bool *right) {
  const uint64_t expected = label_to(peer, request->label);
  *right = finish_message(request, notice, expected, bytes);
  bool follows = *bytes == LABEL_BYTES;
  if (announced == NULL) return follows ? take_announced(c, peer, NULL, bytes, NULL) : NULL;
  if (!follows && queue_withdraw(announced)) return NULL; /* nothing comes */
  int64_t length;
  *right &= finish_message(request, announced, expected, &length);
  if (follows) *bytes = length;
  return NULL;
}

/* Receive the messages of a plan: all of them, so that none is left to the next call. */
static ffi_error *finish_planned(struct call *c, struct request *request, const struct plan *plan) {
  const struct peer *other = NULL; /* the first that has sent something else */
  int64_t others_bytes = 0;
  bool received = true;
  ffi_error *error = NULL;
  struct receive *announced = &request->receives[plan->receive_count];
  for (int i = 0; i < plan->receive_count; i++) {
    const struct peer *peer = &plan->receives[i];
    struct receive *message = is_announced(peer) ? announced++ : NULL;
    int64_t bytes;
    bool right;
    error = call_first(c, error, finish_peer(c, request, peer, &request->receives[i], message, &bytes, &right));
    received &= bytes >= 0;
    if (bytes >= 0 && !right && other == NULL) other = peer, others_bytes = bytes;
  }
  if (error == NULL) error = fail_noted(c, request);
  if (error == NULL && !received) error = fail_forgotten(c);
  return error == NULL && other != NULL ? fail_planned(c, other, others_bytes) : error;
}

/* Receive and drop the messages of a request, so that they are not left to the next call. */
static void drop_messages(struct request *request) {
  for (int i = 0; i < request->receive_count; i++) {
    struct receive *receive = &request->receives[i];
    if (!complete_receive(request, receive) || receive->state != RECEIVE_MATCHED) continue;
    MPI_Message message = (MPI_Message)receive->info.handle;
    message_discard(&message, bytes_of(receive));
  }
}

/* Write the result of a request. */
static ffi_error *finish_request(struct call *c, struct request *request, const struct buffer *out) {
  if (request->receive_count > 0) return finish_receive(c, request, out);
  if (request->result != NULL && out->count > 0) memcpy(out->data, request->result, buffer_bytes(out));
  return NULL;
}

/* Write the result of a request that no batch maps, for a wait that a batch maps: the same result for each of the
 * batch. */
static ffi_error *finish_batch(struct call *c, struct request *request, const struct buffer *out, int64_t batch) {
  struct buffer one = {NULL, request->count, request->type, ROLE_WRITE};
  int64_t rows = request->operation->row == ROW_ialltoall ? c->comm->size : 1;
  size_t width = buffer_bytes(&one) / (size_t)rows;
  one.data = malloc(buffer_bytes(&one) + 1);
  if (one.data == NULL) {
    drop_messages(request);
    return call_fail(c, FFI_INTERNAL, "no memory for %zu bytes", buffer_bytes(&one));
  }
  ffi_error *error = finish_request(c, request, &one);
  for (int64_t i = 0; i < rows * batch && error == NULL; i++)
    memcpy((char *)out->data + (size_t)i * width, (char *)one.data + (size_t)(i / batch) * width, width);
  free(one.data);
  return error;
}

/* If the ranks have started different operations, these may never end. Compare the starts while the handles of a
 * request are under way. Return the error that a comparison reports, or NULL. */
static ffi_error *compare_while_under_way(struct call *c, struct request *request) {
  ffi_error *error = NULL;
  for (int i = 0; i < request->handle_count && error == NULL; i++)
    while (error == NULL && agreement_is_open(request->comm) && test_handle(request, &request->handles[i])) {
      error = compare_started(c, request->comm, false);
      sched_yield();
    }
  return error;
}

/* Wait for one request. `out`: NULL without a result. */
static ffi_error *wait_for(struct call *c, struct request *request, const struct buffer *out, int64_t batch) {
  int64_t count = out != NULL ? out->count : 0;
  bool planned = attribute_of(request->operation, KIND_PLAN) >= 0;
  bool same = (out != NULL ? out->type : NULL) == request->type && !planned, mapped = request->batch == 1 && batch > 1;
  struct own_words own = call_speak_for(c, request);
  struct watched *record = watchdog_begin_summary(request->summary, SUMMARY_WORDS);
  ffi_error *error = compare_while_under_way(c, request);
  if (error != NULL) return watchdog_end(record), call_speak_again(c, own), error; /* MPI still has the memory */
  complete_handles(request);
  bool compared = attribute_of(request->operation, KIND_DERIVATIVE) >= 0;
  if ((error = compare_started(c, request->comm, compared)) == NULL) error = fail_noted(c, request);
  if (error == NULL) error = call_confirm_result(c, request->operation);
  if (error == NULL && (error = request_check_order(c, request)) != NULL)
    drop_messages(request);
  else if (error == NULL && same && out != NULL && mapped && count == batch * request->count)
    error = finish_batch(c, request, out, batch);
  else if (error == NULL && same && count == request->count)
    error = finish_request(c, request, out);
  else if (error == NULL) {
    drop_messages(request);
    error = planned
                ? call_fail(c, FFI_INTERNAL, "it has a plan: reinstall jaxmpi")
                : call_fail(c, FFI_UNIMPLEMENTED,
                            "a result of %" PRId64 " elements, of an array of %" PRId64
                            ": it has been started inside of some of the jax.vmap around the wait, and of others not",
                            count, request->count);
  }
  watchdog_end(record);
  request_end(request);
  call_speak_again(c, own);
  return error;
}

/* Wait for all requests, also after an error. */
ffi_error *BODY(wait)(struct call *c) {
  ARGUMENTS(wait, c);
  BEGIN(c, Wait, "with");
  int requests = c->first[1], outs = c->first[2] - c->first[1];
  const struct buffer *out = b.out, *end = b.out + outs;
  ffi_error *first = NULL;
  for (int i = 0; i < requests; i++) {
    ffi_error *error;
    const struct buffer *id = &b.request[i];
    struct request *request = request_take(c, id, a.zero, &error);
    bool has_result = requests == 1     ? outs == 1
                      : request != NULL ? request->type != NULL
                                        : a.zero > 0 && i < 62 && (a.zero >> (i + 1) & 1) != 0;
    const struct buffer *result = has_result && out < end ? out++ : NULL;
    if (request != NULL)
      error = wait_for(c, request, result, id->count / 2);
    else if (error == NULL && result != NULL)
      error = call_zero(c, result->data, buffer_bytes(result));
    bool failed = error != NULL;
    first = call_first(c, first, error);
    if (i + 1 < requests) timeline_next(c, failed);
  }
  return first;
}

/* `error`: an error that is known already. Then the messages are dropped. */
static ffi_error *wait_for_planned(struct call *c, struct request *request, ffi_error *error) {
  struct watched *record = watchdog_begin_summary(request->summary, SUMMARY_WORDS);
  struct own_words own = call_speak_for(c, request);
  complete_handles(request);
  if (error == NULL) error = request_check_order(c, request);
  int at_plan = attribute_of(request->operation, KIND_PLAN); /* the request may be of another plan */
  if (at_plan >= 0)
    error = call_first(c, error, finish_planned(c, request, object_of(request->attributes[at_plan])));
  else
    drop_messages(request);
  call_speak_again(c, own);
  watchdog_end(record);
  return error;
}

ffi_error *BODY(exchange_finish)(struct call *c) {
  ARGUMENTS(exchange_finish, c);
  const struct plan *plan = object_of(a.plan);
  BEGIN(c, Wait, "with");
  ffi_error *error;
  struct request *request = request_take(c, b.request, a.zero, &error);
  if (error != NULL) return error;
  struct call arrays; /* with the arrays as the plan knows them: operands, then results */
  call_copy(&arrays, c);
  struct buffer *first = &arrays.buffers[c->first[1]];
  memmove(first, first + 1, (size_t)(c->buffer_count - c->first[2]) * sizeof *first);
  arrays.first[2] = (short)(c->buffer_count - 1);
  error = plan_check(&arrays, plan, !is_of_messages(plan), true);
  bool fits = error == NULL;
  int at_plan = request != NULL ? attribute_of(request->operation, KIND_PLAN) : -1;
  if (fits && request != NULL && at_plan < 0)
    error = call_fail(c, FFI_INTERNAL, "it has no plan: reinstall jaxmpi");
  else if (fits && request != NULL && request->attributes[at_plan] != a.plan)
    error = call_fail(c, FFI_UNIMPLEMENTED,
                      "the fields are not those that were started with: jax.vmap maps some of them on one side only");
  if (request != NULL) error = wait_for_planned(c, request, error);
  if (error == NULL) {
    plan_fill(&arrays, plan);
    char *stage = request != NULL ? request->data : calloc(1, (size_t)(plan->sent + plan->received) + 1);
    if (stage != NULL)
      plan_unpack(&arrays, plan, stage);
    else
      error = call_fail(c, FFI_INTERNAL, "no memory for the messages");
    if (request == NULL) free(stage);
  }
  if (fits && error != NULL) plan_spoil(&arrays, plan);
  if (request != NULL) request_end(request);
  return error;
}
