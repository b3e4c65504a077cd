/* The bodies of what starts an operation, and of what waits for it: see core/requests.h. Compiled once per ABI. */
#include "core/requests.h"

#include <sched.h>

#include "core/timeline.h"
#include "core/watch.h"
#include "mpi/bodies.h"

#include "core/agreement.h"

_Static_assert(sizeof(MPI_Status) <= sizeof((struct receive *)0)->status, "a status has its place in a receive");

static inline MPI_Status *status_of(struct receive *receive) { return (MPI_Status *)(void *)receive->status; }

/* Whether messages tell what they consist of: JAXMPI_CHECK. */
static bool has_labels(void) {
  return atomic_load_explicit(&runtime.check, memory_order_relaxed) &&
         atomic_load_explicit(&runtime.labels, memory_order_relaxed);
}

/* --- matching: under requests_lock --- */

/* Whether a receive may have a message with this tag. With any tag those of plans never are for it; irecv, which may be
 * matched much later than it is started, leaves those of derivatives alone, too (_mpi/tags.py). The derivative of sendrecv
 * receives with any tag. */
static bool takes(const struct receive *receive, int tag) {
  if (receive->tag != ABI_ANY_TAG) return receive->tag == tag;
  return receive->request != NULL ? tag < plans_tag() : tag != plans_tag();
}

/* False: no memory. */
static bool keep_message(struct communicator *comm, MPI_Message message, const MPI_Status *status) {
  struct receive *kept = aligned_alloc(_Alignof(struct receive), sizeof *kept);
  if (kept == NULL) return false;
  *kept = (struct receive){.comm = comm, .message = (intptr_t)message};
  *status_of(kept) = *status;
  receive_keep(kept);
  return true;
}

ffi_error *keep_found(const struct call *call, MPI_Message message, const MPI_Status *status) {
  pthread_mutex_lock(&requests_lock);
  bool kept = keep_message(call->comm, message, status);
  pthread_mutex_unlock(&requests_lock);
  return kept ? NULL : call_fail(call, FFI_INTERNAL, "no memory to keep a message");
}

static bool fits(const struct receive *receive, const MPI_Status *status) {
  return (receive->source == ABI_ANY_SOURCE || receive->source == status->MPI_SOURCE) &&
         takes(receive, status->MPI_TAG);
}

/* Gives a message to a receive: begins to receive it, unless a thread waits for it or must look at it first. */
static void hand(struct receive *receive, MPI_Message message, const MPI_Status *status) {
  receive_forget(receive);
  *status_of(receive) = *status;
  receive->message = (intptr_t)message;
  receive->state = MATCHED;
  int64_t bytes = message_count(status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
  bool labelled = receive->request != NULL && has_labels(); /* then it is looked at in the wait, whatever its size */
  if (receive->waited_for || bytes < 0 || (bytes != receive->bytes && !labelled)) return;
  if (receive->memory == NULL &&
      (receive->request == NULL || !request_room(receive->request, (size_t)bytes, &receive->memory)))
    return;
  struct span span = span_of_bytes(bytes);
  if (span.code != MPI_SUCCESS) return;
  MPI_Request request;
  receive->function = "MPI_Imrecv";
  receive->code = mpi.Imrecv(receive->memory, span.count, span.type, &message, &request);
  if (receive->code == MPI_SUCCESS) receive->handle = (intptr_t)request;
  receive->state = UNDER_WAY;
  span_free(&span);
}

static bool overlap(const struct receive *a, const struct receive *b) {
  return a->comm == b->comm && (a->source == b->source || a->source == ABI_ANY_SOURCE || b->source == ABI_ANY_SOURCE) &&
         (a->tag == b->tag || a->tag == ABI_ANY_TAG || b->tag == ABI_ANY_TAG);
}

/* Whether what fits `a` also fits `b`. */
static bool is_within(const struct receive *a, const struct receive *b) {
  return (b->source == ABI_ANY_SOURCE || a->source == b->source) && (b->tag == ABI_ANY_TAG || a->tag == b->tag);
}

/* The first that a message fits: it has been expected for longest. */
static struct receive *first_for(struct receive *receive, const MPI_Status *status) {
  struct receive *to = receives_first;
  while (to != receive && (to->comm != receive->comm || !fits(to, status))) to = to->next;
  return to;
}

/* Whether a message may fit this receive and an earlier one, which then must have the first message that fits it: that
 * may be another, which has come since the earlier one was tried. */
static bool is_behind_others(const struct receive *receive) {
  const struct receive *other = receives_first;
  while (other != receive && (!overlap(other, receive) || is_within(other, receive))) other = other->next;
  return other != receive;
}

static void fail_match(struct receive *receive, const char *function, int code) {
  receive_forget(receive);
  receive->code = code, receive->function = function, receive->state = MATCHED;
}

/* Gives a message that was kept to a receive, if there is one for it. */
static bool hand_kept(struct receive *receive) {
  struct receive *kept = kept_first;
  while (kept != NULL && (kept->comm != receive->comm || !fits(receive, status_of(kept)))) kept = kept->next;
  if (kept == NULL) return false;
  receive_unkeep(kept);
  hand(receive, (MPI_Message)kept->message, status_of(kept));
  free(kept);
  return true;
}

/* Puts a message aside that is not for any tag: gives it to a receive that expects it, or keeps it for one. Returns an
 * MPI error code. */
static int set_aside(struct receive *receive, int source, int tag) {
  MPI_Message message;
  MPI_Status status;
  int found = 0, code = mpi.Improbe(source, tag, (MPI_Comm)receive->comm->handle, &found, &message, &status);
  if (code != MPI_SUCCESS || !found) return code;
  struct receive *to = receives_first;
  while (to != NULL && (to->comm != receive->comm || !fits(to, &status))) to = to->next;
  if (to != NULL)
    hand(to, message, &status);
  else if (!keep_message(receive->comm, message, &status))
    return NO_MEMORY;
  return MPI_SUCCESS;
}

/* If a message has come that this receive may have: gives it, or one before it, to the first receive that it fits. */
static bool match_one(struct receive *receive) {
  MPI_Comm comm = (MPI_Comm)receive->comm->handle;
  MPI_Message message;
  MPI_Status status;
  int found = 0, code, source = receive->source, tag = receive->tag;
  if (hand_kept(receive)) return true;
  if (tag == ABI_ANY_TAG || is_behind_others(receive)) {
    code = mpi.Iprobe(source, tag, comm, &found, &status);
    if (code != MPI_SUCCESS) fail_match(receive, "MPI_Iprobe", code);
    if (code != MPI_SUCCESS || !found) return false;
    if (!takes(receive, status.MPI_TAG)) {
      code = set_aside(receive, status.MPI_SOURCE, status.MPI_TAG);
      if (code != MPI_SUCCESS) fail_match(receive, "MPI_Improbe", code);
      return code == MPI_SUCCESS;
    }
    struct receive *to = first_for(receive, &status);
    if (to != receive && !is_within(to, receive)) return match_one(to);
    source = status.MPI_SOURCE, tag = status.MPI_TAG;
  }
  code = mpi.Improbe(source, tag, comm, &found, &message, &status);
  if (code != MPI_SUCCESS) fail_match(receive, "MPI_Improbe", code);
  if (code != MPI_SUCCESS || !found) return false;
  hand(first_for(receive, &status), message, &status);
  return true;
}

void match_messages(const struct communicator *comm) {
  struct receive *next;
  /* What was kept has come before what MPI has. */
  for (struct receive *receive = kept_first != NULL ? receives_first : NULL; receive != NULL; receive = next) {
    next = receive->next;
    if (receive->state == EXPECTED) hand_kept(receive);
  }
  for (struct receive *receive = receives_first; receive != NULL; receive = next) {
    next = receive->next;
    if (comm != NULL && receive->comm != comm) continue;
    while (receive->state == EXPECTED && match_one(receive)) continue;
  }
}

/* Keeps the first error. What has begun is completed all the same: MPI may be using its memory. */
static void note(struct request *request, const char *function, int code) {
  if (code != MPI_SUCCESS && request->code == MPI_SUCCESS) request->code = code, request->function = function;
}

/* Whether it is still under way. */
static bool test(struct request *request, intptr_t *handle) {
  MPI_Request tested = (MPI_Request)*handle;
  MPI_Status ignored;
  int done = 1, code = mpi.Test(&tested, &done, &ignored);
  *handle = (intptr_t)tested;
  note(request, "MPI_Test", code);
  return code == MPI_SUCCESS && !done;
}

bool test_begun(struct request *request) {
  bool under_way = false;
  for (int i = 0; i < request->handle_count; i++) under_way |= test(request, &request->handles[i]);
  for (int i = 0; i < request->receive_count; i++) {
    struct receive *receive = &request->receives[i];
    bool begun = receive->state == UNDER_WAY && receive->code == MPI_SUCCESS;
    under_way |= receive->state == EXPECTED || (begun && test(request, &receive->handle));
  }
  return under_way;
}

bool request_done(struct request *request) {
  bool under_way = false;
  for (int i = 0; i < request->handle_count; i++) under_way |= test(request, &request->handles[i]);
  pthread_mutex_lock(&requests_lock);
  match_messages(NULL);
  for (int i = 0; i < request->receive_count; i++) under_way |= request->receives[i].state == EXPECTED;
  pthread_mutex_unlock(&requests_lock);
  for (int i = 0; i < request->receive_count; i++) {
    struct receive *receive = &request->receives[i];
    bool begun = receive->state == UNDER_WAY && receive->code == MPI_SUCCESS;
    under_way |= begun && test(request, &receive->handle);
  }
  return !under_way;
}

/* --- waiting --- */

bool await_match(struct receive *receive, double deadline, int64_t run) {
  bool late = false;
  pthread_mutex_lock(&requests_lock);
  if (receive->alone) receive_expect(receive);
  receive->alone = false;
  receive->waited_for = true;
  while (receive->state == EXPECTED) {
    match_messages(NULL);
    if (receive->state != EXPECTED) break;
    if (deadline > 0 && deadline_is_over(deadline)) {
      late = deadline_give_up(run);
      deadline = 0;
    }
    if (late) receive_forget(receive), receive->state = IDLE;
    pthread_mutex_unlock(&requests_lock);
    sched_yield();
    pthread_mutex_lock(&requests_lock);
  }
  pthread_mutex_unlock(&requests_lock);
  return !late;
}

ffi_error *match_after_all(struct call *call, int source, int tag, MPI_Message *message, MPI_Status *status) {
  bool late;
  return match_in_time(call, source, tag, 0, message, status, &late);
}

ffi_error *match_in_time(struct call *call, int source, int tag, double deadline, MPI_Message *message,
                         MPI_Status *status, bool *late) {
  *late = false;
  struct receive receive = {.comm = call->comm, .source = source, .tag = tag, .waited_for = true};
  if (source == ABI_PROC_NULL) {
    TRY_MPI(call, Mprobe, source, tag, (MPI_Comm)call->comm->handle, message, status);
    return NULL;
  }
  pthread_mutex_lock(&requests_lock);
  receive_expect(&receive);
  pthread_mutex_unlock(&requests_lock);
  *late = !await_match(&receive, deadline, deadline > 0 ? ffi_run(call->frame) : 0);
  if (*late) return deadline_fail(call);
  if (receive.state == IDLE) return call_check(call); /* the communicator has been freed */
  if (receive.code != MPI_SUCCESS) return call_fail_in(call, receive.function, receive.code);
  *message = (MPI_Message)receive.message;
  *status = *status_of(&receive);
  return NULL;
}

/* Until what has been begun is done. Messages that are expected meanwhile must not wait. */
static void complete(struct request *request, intptr_t *handle) {
  while (atomic_load_explicit(&receives_expected, memory_order_relaxed) > 0 && test(request, handle)) {
    pthread_mutex_lock(&requests_lock);
    match_messages(NULL);
    pthread_mutex_unlock(&requests_lock);
    sched_yield();
  }
  MPI_Request waited = (MPI_Request)*handle;
  MPI_Status ignored;
  note(request, "MPI_Wait", mpi.Wait(&waited, &ignored));
}

static void complete_all(struct request *request) {
  for (int i = 0; i < request->handle_count; i++) complete(request, &request->handles[i]);
}

static ffi_error *fail_noted(struct call *c, const struct request *request) {
  return request->code == MPI_SUCCESS ? NULL : call_fail_in(c, request->function, request->code);
}

/* Waits until the message of a receive has been received or is matched. False: it never will be; the error is noted,
 * unless the communicator has been freed. */
static bool complete_receive(struct request *request, struct receive *receive) {
  await_match(receive, 0, 0);
  note(request, receive->function, receive->code);
  if (receive->state == UNDER_WAY && receive->code == MPI_SUCCESS) complete(request, &receive->handle);
  return receive->state != IDLE && receive->code == MPI_SUCCESS;
}

static int64_t bytes_of(struct receive *receive) {
  return message_count(status_of(receive), (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
}

static ffi_error *fail_forgotten(const struct call *c) {
  return call_fail(c, FFI_FAILED_PRECONDITION,
                   "the communicator was freed before the message had come, which is no longer expected. Wait first");
}

/* The message of irecv. */
static ffi_error *finish_receive(struct call *c, struct request *request, const struct buffer *out) {
  struct receive *receive = &request->receives[0];
  MPI_Message message;
  MPI_Status status;
  if (receive->source == ABI_PROC_NULL) return call_zero(c, out->data, buffer_bytes(out));
  if (receive->alone) { /* nobody else looks for messages */
    TRY_MPI(c, Mprobe, receive->source, receive->tag, (MPI_Comm)c->comm->handle, &message, &status);
    if (takes(receive, status.MPI_TAG)) return receive_matched(c, out, &message, &status);
    PASS(keep_found(c, message, &status));
  }
  bool received = complete_receive(request, receive);
  PASS(fail_noted(c, request));
  if (!received) return fail_forgotten(c);
  if (receive->state == MATCHED) {
    message = (MPI_Message)receive->message;
    return receive_matched(c, out, &message, status_of(receive));
  }
  c->from = status_of(receive)->MPI_SOURCE;
  c->from_tag = status_of(receive)->MPI_TAG;
  if (has_labels()) return unpack_labelled(c, out, receive->memory, bytes_of(receive), status_of(receive));
  if (out->count > 0) memcpy(out->data, receive->memory, buffer_bytes(out));
  return NULL;
}

/* Receives what has been matched into the memory of its receive, or drops it if it is of another size. */
static void take_planned(struct request *request, struct receive *receive, int64_t bytes) {
  MPI_Message message = (MPI_Message)receive->message;
  struct span span = span_of_bytes(bytes);
  int code = span.code;
  if (bytes != receive->bytes || code != MPI_SUCCESS)
    discard(&message, bytes);
  else
    code = mpi.Mrecv(receive->memory, span.count, span.type, &message, status_of(receive));
  span_free(&span);
  note(request, "MPI_Mrecv", code);
}

/* The messages of a plan: all of them, so that none is left to the next call. */
static ffi_error *finish_planned(struct call *c, struct request *request, const struct plan *plan) {
  const struct peer *other = NULL; /* the first that has sent something else */
  int64_t others_bytes = 0;
  bool received = true;
  for (int i = 0; i < request->receive_count; i++) {
    struct receive *receive = &request->receives[i];
    uint64_t label = ~request->label;
    bool its = complete_receive(request, receive);
    int64_t bytes = its ? bytes_of(receive) : 0;
    received &= its;
    if (its && receive->state == MATCHED) take_planned(request, receive, bytes);
    if (its && bytes == receive->bytes) memcpy(&label, receive->memory, LABEL_BYTES);
    if (its && label != request->label && other == NULL) other = &plan->receives[i], others_bytes = bytes;
  }
  PASS(fail_noted(c, request));
  if (!received) return fail_forgotten(c);
  return other != NULL ? fail_planned(c, other, others_bytes) : NULL;
}

/* Receives messages that nobody wants any more, so that they are not left to the next call. */
static void drop_messages(struct request *request) {
  for (int i = 0; i < request->receive_count; i++) {
    struct receive *receive = &request->receives[i];
    if (!complete_receive(request, receive) || receive->state != MATCHED) continue;
    MPI_Message message = (MPI_Message)receive->message;
    discard(&message, bytes_of(receive));
  }
}

struct own take_over(struct call *c, const struct request *request) {
  struct own own = {c->operation, c->buffer_count};
  c->request = request_number(request);
  c->operation = request->operation;
  c->buffer_count = 0;
  memcpy(c->attributes, request->attributes, sizeof c->attributes);
  return own;
}

/* What comes out of a request. */
static ffi_error *finish(struct call *c, struct request *request, const struct buffer *out) {
  if (request->receive_count > 0) return finish_receive(c, request, out);
  if (request->result != NULL && out->count > 0) memcpy(out->data, request->result, buffer_bytes(out));
  return NULL;
}

/* The same for a wait that a batch maps, of a request that it does not: the result is the same for each of the batch.
 */
static ffi_error *finish_batch(struct call *c, struct request *request, const struct buffer *out, int64_t batch) {
  struct buffer one = {NULL, request->count, request->type, WRITE};
  int64_t rows = request->operation->row == ROW_ialltoall ? c->comm->size : 1;
  size_t width = buffer_bytes(&one) / (size_t)rows;
  one.data = malloc(buffer_bytes(&one) + 1);
  if (one.data == NULL) {
    drop_messages(request);
    return call_fail(c, FFI_INTERNAL, "no memory for %zu bytes", buffer_bytes(&one));
  }
  ffi_error *error = finish(c, request, &one);
  for (int64_t i = 0; i < rows * batch && error == NULL; i++)
    memcpy((char *)out->data + (size_t)i * width, (char *)one.data + (size_t)(i / batch) * width, width);
  free(one.data);
  return error;
}

/* What ranks have started differently may never be done: the error, if that is heard meanwhile. */
static ffi_error *compare_while_under_way(struct call *c, struct request *request) {
  ffi_error *error = NULL;
  for (int i = 0; i < request->handle_count && error == NULL; i++)
    while (error == NULL && agreement_is_open(request->comm) && test(request, &request->handles[i])) {
      error = compare_started(c, request->comm, false);
      sched_yield();
    }
  return error;
}

/* Waits for one request. `out`: NULL without a result. */
static ffi_error *wait_for(struct call *c, struct request *request, const struct buffer *out, int64_t batch) {
  int64_t count = out != NULL ? out->count : 0;
  bool planned = request->operation->row == ROW_exchange_start;
  bool same = (out != NULL ? out->type : NULL) == request->type && !planned, mapped = request->batch == 1 && batch > 1;
  struct own own = take_over(c, request);
  struct watched *record = watch_begin_words(request->words, WORDS);
  ffi_error *error = compare_while_under_way(c, request);
  if (error != NULL) return watch_end(record), give_back(c, own), error; /* MPI still has its memory */
  complete_all(request);
  bool compared = attribute_of(request->operation, DERIVATIVE) >= 0;
  if ((error = compare_started(c, request->comm, compared)) == NULL) error = fail_noted(c, request);
  if (error == NULL && (error = request_check_order(c, request)) != NULL)
    drop_messages(request);
  else if (error == NULL && same && out != NULL && mapped && count == batch * request->count)
    error = finish_batch(c, request, out, batch);
  else if (error == NULL && same && count == request->count)
    error = finish(c, request, out);
  else if (error == NULL) {
    drop_messages(request);
    error = planned
                ? call_fail(c, FFI_INTERNAL, "it has a plan: reinstall jaxmpi")
                : call_fail(c, FFI_UNIMPLEMENTED,
                            "a result of %" PRId64 " elements, of an array of %" PRId64
                            ": it has been started inside of some of the jax.vmap around the wait, and of others not",
                            count, request->count);
  }
  watch_end(record);
  request_end(request);
  give_back(c, own);
  return error;
}

/* All requests are waited for, also after an error. */
ffi_error *BODY(wait)(struct call *c) {
  ARGUMENTS(wait, c);
  BEGIN(c, Wait, "with");
  int requests = c->first[1], outs = c->first[2] - c->first[1];
  if (deadlines_on()) PASS(wait_in_time(c, b.request, requests));
  const struct buffer *out = b.out, *end = b.out + outs;
  ffi_error *first = NULL;
  for (int i = 0; i < requests; i++) {
    ffi_error *error;
    const struct buffer *id = &b.request[i];
    struct request *request = request_take(c, id, a.zero, &error);
    bool has_result = requests == 1     ? outs == 1
                      : request != NULL ? request->type != NULL
                                        : a.zero > 0 && i < 62 && (a.zero >> (i + 1) & 1) != 0;
    const struct buffer *its = has_result && out < end ? out++ : NULL;
    if (request != NULL)
      error = wait_for(c, request, its, id->count / 2);
    else if (error == NULL && its != NULL)
      error = call_zero(c, its->data, buffer_bytes(its));
    bool failed = error != NULL;
    first = call_first(c, first, error);
    if (i + 1 < requests) timeline_next(c, failed);
  }
  return first;
}

/* `error`: what is known to be wrong with it; then its messages are dropped. */
static ffi_error *wait_for_planned(struct call *c, struct request *request, const struct plan *plan, ffi_error *error) {
  struct watched *record = watch_begin_words(request->words, WORDS);
  complete_all(request);
  if (error == NULL) error = request_check_order(c, request);
  if (error != NULL) {
    drop_messages(request);
  } else {
    struct own own = take_over(c, request);
    error = finish_planned(c, request, plan);
    give_back(c, own);
  }
  watch_end(record);
  return error;
}

ffi_error *BODY(exchange_finish)(struct call *c) {
  ARGUMENTS(exchange_finish, c);
  const struct plan *plan = object_of(a.plan);
  BEGIN(c, Wait, "with");
  if (deadlines_on()) PASS(wait_in_time(c, b.request, 1));
  ffi_error *error;
  struct request *request = request_take(c, b.request, a.zero, &error);
  if (error != NULL) return error;
  struct call arrays; /* as the plan knows them: operands, then results */
  call_copy(&arrays, c);
  struct buffer *first = &arrays.buffers[c->first[1]];
  memmove(first, first + 1, (size_t)(c->buffer_count - c->first[2]) * sizeof *first);
  arrays.first[2] = (short)(c->buffer_count - 1);
  error = plan_check(&arrays, plan);
  if (error == NULL && request != NULL && request->operation->row != ROW_exchange_start)
    error = call_fail(c, FFI_INTERNAL, "it has no plan: reinstall jaxmpi");
  if (error == NULL && request != NULL && request->attributes[attribute_of(request->operation, PLAN)] != a.plan)
    error = call_fail(c, FFI_UNIMPLEMENTED,
                      "the fields are not those that were started with: jax.vmap maps some of them on one side only");
  if (request != NULL) error = wait_for_planned(c, request, plan, error);
  if (error == NULL) {
    plan_fill(&arrays, plan);
    char *stage = request != NULL ? request->data : calloc(1, (size_t)(plan->sent + plan->received) + 1);
    if (stage != NULL)
      plan_unpack(&arrays, plan, stage);
    else
      error = call_fail(c, FFI_INTERNAL, "no memory for the messages");
    if (request == NULL) free(stage);
  }
  if (request != NULL) request_end(request);
  return error;
}

/* --- starting --- */

/* The error of MPI for a request that could not be started as a whole. */
static ffi_error *give_up(struct call *c, struct request *request, int code) {
  ffi_error *error = call_fail_mpi(c, code);
  complete_all(request);
  request_end(request);
  return error;
}

/* From here on it can be waited for. */
static ffi_error *begun(struct call *c, struct request *request, const struct buffer *id, int64_t moved) {
  request_begin(request, id, moved);
  c->request = request_number(request);
  return NULL;
}

/* A request with a copy of `in`, which becomes the result. */
static ffi_error *with_copy(struct call *c, const struct buffer *id, const struct buffer *in, size_t more, int handles,
                            struct request **made) {
  PASS(request_new(c, id, buffer_bytes(in) + more + 1, handles, 0, made));
  struct request *request = *made;
  if (in->count > 0) memcpy(request->data, in->data, buffer_bytes(in));
  request->type = in->type, request->count = in->count, request->result = request->data;
  return NULL;
}

/* MPI_Request of the next handle. */
#define NEXT(request, made) ((request)->handles[(request)->handle_count++] = (intptr_t)(made))

static int chunks_of(int64_t count) {
  return (int)((count + runtime.max_count - 1) / runtime.max_count) + (count == 0);
}

ffi_error *BODY(hold)(struct call *c) {
  ARGUMENTS(hold, c);
  (void)a;
  struct request *request;
  PASS(with_copy(c, b.request, b.in, 0, 0, &request));
  return begun(c, request, b.request, 0);
}

ffi_error *BODY(iallreduce)(struct call *c) {
  ARGUMENTS(iallreduce, c);
  BEGIN(c, Iallreduce, "with %" PRId64 " items and", b.in->count);
  struct request *request;
  PASS(with_copy(c, b.request, b.in, 0, chunks_of(b.in->count), &request));
  FOR_CHUNKS(c, b.in->count, i, n) {
    MPI_Request made;
    void *data = request->data + (size_t)i * b.in->type->bytes;
    int code = mpi.Iallreduce(ABI_IN_PLACE, data, (int)n, element(b.in->type), handle_of(a.op), comm, &made);
    if (code != MPI_SUCCESS) return give_up(c, request, code);
    NEXT(request, made);
  }
  return begun(c, request, b.request, (int64_t)buffer_bytes(b.in));
}

/* Of other ranks than root the result is zero. */
ffi_error *BODY(ireduce)(struct call *c) {
  ARGUMENTS(ireduce, c);
  BEGIN(c, Ireduce, "-> %d with %" PRId64 " items and", (int)a.root, b.in->count);
  bool root = c->comm->rank == a.root;
  size_t bytes = buffer_bytes(b.in);
  struct request *request;
  PASS(with_copy(c, b.request, b.in, root ? 0 : bytes, chunks_of(b.in->count), &request));
  if (!root) memset(request->result = request->data + bytes, 0, bytes);
  FOR_CHUNKS(c, b.in->count, i, n) {
    MPI_Request made;
    void *data = request->data + (size_t)i * b.in->type->bytes;
    int code = mpi.Ireduce(root ? ABI_IN_PLACE : data, root ? data : NULL, (int)n, element(b.in->type), handle_of(a.op),
                           (int)a.root, comm, &made);
    if (code != MPI_SUCCESS) return give_up(c, request, code);
    NEXT(request, made);
  }
  return begun(c, request, b.request, (int64_t)bytes);
}

ffi_error *BODY(ialltoall)(struct call *c) {
  ARGUMENTS(ialltoall, c);
  (void)a;
  BEGIN(c, Ialltoall, "with %" PRId64 " items and", b.in->count);
  size_t bytes = buffer_bytes(b.in);
  struct request *request;
  PASS(with_copy(c, b.request, b.in, bytes, 1, &request));
  request->result = request->data + bytes;
  struct span s = span_of(b.in->type, b.in->count / c->comm->size);
  MPI_Request made;
  int code = s.code;
  if (code == MPI_SUCCESS)
    code = mpi.Ialltoall(request->data, s.count, s.type, request->result, s.count, s.type, comm, &made);
  span_free(&s);
  if (code != MPI_SUCCESS) return give_up(c, request, code);
  NEXT(request, made);
  return begun(c, request, b.request, (int64_t)bytes);
}

ffi_error *BODY(ibarrier)(struct call *c) {
  ARGUMENTS(ibarrier, c);
  (void)a;
  BEGIN(c, Ibarrier, "with");
  struct request *request;
  PASS(request_new(c, b.request, 0, 1, 0, &request));
  MPI_Request made;
  int code = mpi.Ibarrier(comm, &made);
  if (code != MPI_SUCCESS) return give_up(c, request, code);
  NEXT(request, made);
  return begun(c, request, b.request, 0);
}

/* in: on root only */
ffi_error *BODY(ibcast)(struct call *c) {
  ARGUMENTS(ibcast, c);
  bool root = c->comm->rank == a.root;
  if (root) NEEDS(c, b.in);
  struct buffer data = {root ? b.in->data : NULL, a.count, datatype_find((int)a.dtype), READ};
  if (data.type == NULL || a.count < 0 || (root && (b.in->count != a.count || b.in->type != data.type)))
    return call_fail(c, FFI_INTERNAL, "an array of another shape: reinstall jaxmpi");
  BEGIN(c, Ibcast, "from %d with %" PRId64 " items and", (int)a.root, a.count);
  struct request *request;
  PASS(request_new(c, b.request, buffer_bytes(&data) + 1, 1, 0, &request));
  if (root && a.count > 0) memcpy(request->data, data.data, buffer_bytes(&data));
  request->type = data.type, request->count = a.count, request->result = request->data;
  struct span s = span_of(data.type, a.count);
  MPI_Request made;
  int code = s.code;
  if (code == MPI_SUCCESS) code = mpi.Ibcast(request->data, s.count, s.type, (int)a.root, comm, &made);
  span_free(&s);
  if (code != MPI_SUCCESS) return give_up(c, request, code);
  NEXT(request, made);
  return begun(c, request, b.request, (int64_t)buffer_bytes(&data));
}

ffi_error *BODY(isend)(struct call *c) {
  ARGUMENTS(isend, c);
  BEGIN(c, Isend, "-> %d with tag %d and", (int)a.dest, (int)a.tag);
  bool labelled = c->labelled && atomic_load_explicit(&runtime.labels, memory_order_relaxed);
  size_t front = labelled ? sizeof(struct label) : 0, bytes = front + buffer_bytes(b.in);
  struct request *request;
  PASS(request_new(c, b.request, bytes + 1, 1, 0, &request));
  if (labelled) {
    struct label label = label_of(c, b.in);
    memcpy(request->data, &label, sizeof label);
  }
  if (b.in->count > 0) memcpy(request->data + front, b.in->data, buffer_bytes(b.in));
  struct span s = labelled ? span_of_bytes((int64_t)bytes) : span_of(b.in->type, b.in->count);
  MPI_Request made;
  int code = s.code;
  if (code == MPI_SUCCESS) code = mpi.Isend(request->data, s.count, s.type, (int)a.dest, (int)a.tag, comm, &made);
  span_free(&s);
  if (code != MPI_SUCCESS) return give_up(c, request, code);
  NEXT(request, made);
  return begun(c, request, b.request, (int64_t)bytes);
}

static ffi_error *need_threads(const struct call *c) {
  if (!runtime.serialize) return NULL;
  return call_fail(c, FFI_UNIMPLEMENTED,
                   "messages are expected by a thread of the library's, which needs MPI_THREAD_MULTIPLE: leave "
                   "mpi4py.rc.thread_level at 'multiple', or receive with recv. Nothing was sent");
}

static void expect(struct receive *receive, struct communicator *comm, int source, int tag, int64_t bytes) {
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
  expect(&request->receives[0], c->comm, (int)a.source, (int)a.tag, bytes);
  request->receives[0].request = request;
  return begun(c, request, b.request, bytes);
}

/* The messages of a plan: those to send leave at once, the others are expected. */
ffi_error *BODY(exchange_start)(struct call *c) {
  ARGUMENTS(exchange_start, c);
  const struct plan *plan = object_of(a.plan);
  PASS(need_threads(c));
  BEGIN(c, Isend, "to %d ranks and from %d with", plan->send_count, plan->receive_count);
  PASS(plan_check_operands(c, plan));
  size_t bytes = (size_t)(plan->sent + plan->received);
  struct request *request;
  PASS(request_new(c, b.request, bytes + 1, plan->send_count, plan->receive_count, &request));
  request->label = plan_label(c, plan, atomic_fetch_add(&c->comm->planned, 1) + 1);
  plan_compose(c, plan, request->data);
  for (int i = 0; i < plan->receive_count; i++) {
    const struct peer *peer = &plan->receives[i];
    expect(&request->receives[i], c->comm, peer->rank, plan->tag, peer->bytes);
    request->receives[i].memory = request->data + peer->stage;
  }
  for (int i = 0; i < plan->send_count; i++) {
    const struct peer *peer = &plan->sends[i];
    memcpy(request->data + peer->stage, &request->label, LABEL_BYTES);
    struct span span = span_of_bytes(peer->bytes);
    MPI_Request made;
    int code = span.code;
    if (code == MPI_SUCCESS)
      code = mpi.Isend(request->data + peer->stage, span.count, span.type, peer->rank, plan->tag, comm, &made);
    span_free(&span);
    c->sending = i > 0;
    if (code != MPI_SUCCESS) return give_up(c, request, code);
    NEXT(request, made);
  }
  c->sending = false;
  return begun(c, request, b.request, (int64_t)bytes);
}
