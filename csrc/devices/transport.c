#include "devices/transport.h"

#include <stdlib.h>

#include "core/failure.h"
#include "core/plan.h"
#include "devices/jobs.h"
#include "devices/spaces.h"
#include "execute/body.h"
#include "execute/chunks.h"

enum { SLOTS = 4, OUTGROWN = 48 };

/* A chunk passes these streams of ours, in this order, and these events mark the progress. */
enum { DOWN, THROUGH, UP, STREAMS };
enum { FETCHED, PASSED, STORED, EVENTS };

/* A stream state: pinned memory and other resources that successive operations on one stream share. They use it in
 * stream order, so an operation may be enqueued while an earlier one still uses the memory. If all states of a stream
 * are taken, a thread makes another. */
struct stream_state {
  struct stream_state *next;
  pthread_mutex_t taken;
  const struct memory *memory;
  void *stream;       /* XLA's */
  void *context;      /* of the stream */
  void *done;         /* event: the end of the work enqueued so far */
  struct flags flags; /* for calls left to the stream; made at the first one */
  char *staging;
  size_t capacity;
  void *streams[STREAMS], *events[SLOTS][EVENTS]; /* for chunks; made at the first divided call */
  /* Pinned memory that was too small, freed at the end: freeing makes a driver wait for all streams of the device, and
   * some of them may wait for MPI. In total it is smaller than the memory that has replaced it. */
  void *outgrown[OUTGROWN];
  int outgrown_count;
};

static struct stream_state *states;
static pthread_mutex_t states_lock = PTHREAD_MUTEX_INITIALIZER;

/* --- stream states --- */

static void state_add(struct stream_state *state) {
  pthread_mutex_lock(&states_lock);
  state->next = states;
  states = state;
  pthread_mutex_unlock(&states_lock);
}

/* Make a state, taken by this thread. Return as state_take. */
static int state_make(const struct memory *memory, void *stream, void *context, struct stream_state **result) {
  struct stream_state *state = calloc(1, sizeof *state);
  int code;
  if (state == NULL) return -1;
  if ((code = memory->event_make(&state->done)) != 0) {
    free(state);
    return code;
  }
  pthread_mutex_init(&state->taken, NULL);
  state->memory = memory;
  state->stream = stream;
  state->context = context;
  pthread_mutex_lock(&state->taken);
  state_add(state);
  *result = state;
  return 0;
}

/* Take or make a state for the call's stream, which belongs to this thread until it unlocks `taken`. Return 0, the
 * driver's code, or -1: no memory. */
static int state_take(const struct call *call, void *context, struct stream_state **taken) {
  pthread_mutex_lock(&states_lock);
  struct stream_state *state = states;
  while (state != NULL && (state->stream != call->stream || state->context != context ||
                           state->memory != call->memory || pthread_mutex_trylock(&state->taken) != 0))
    state = state->next;
  pthread_mutex_unlock(&states_lock);
  *taken = state;
  return state != NULL ? 0 : state_make(call->memory, call->stream, context, taken);
}

/* Make the pinned memory hold `bytes` at least. Return 0 or the driver's code. */
static int state_reserve(struct stream_state *state, size_t bytes) {
  if (bytes <= state->capacity) return 0;
  size_t capacity = memory_doubled(state->capacity, bytes);
  void *staging = NULL;
  int code = state->memory->pin(&staging, capacity);
  if (code != 0) return code;
  if (state->staging != NULL) state->outgrown[state->outgrown_count++] = state->staging;
  state->staging = staging;
  state->capacity = capacity;
  return 0;
}

/* Make the streams and events for chunks. After a failure the state keeps the ones that exist, for the next call and
 * for state_free. */
static int state_divide(struct stream_state *state) {
  const struct memory *memory = state->memory;
  void **events = state->events[0];
  int code = 0;
  for (int i = 0; i < STREAMS && code == 0; i++)
    if (state->streams[i] == NULL) code = memory->stream_make(&state->streams[i]);
  for (int i = 0; i < SLOTS * EVENTS && code == 0; i++)
    if (events[i] == NULL) code = memory->event_make(&events[i]);
  return code;
}

/* Wait for all work enqueued with the state. Drop the calls left to a stream if the driver fails. */
static void state_drain(struct stream_state *state) {
  for (int i = 0; i <= STREAMS; i++) {
    void *stream = i < STREAMS ? state->streams[i] : state->stream;
    int code = stream != NULL ? state->memory->stream_synchronize(stream) : 0;
    if (code != 0) jobs_drop(&state->flags, code);
  }
}

/* Free a state, unless MPI may be using the memory. MPI may do so after a failure of the device, when the stream never
 * gets to the end. Return whether the state has been freed. */
static bool state_free(struct stream_state *state) {
  const struct memory *memory = state->memory;
  void **events = state->events[0], *previous;
  if (memory->enter(state->context, &previous) == 0) {
    int code = memory->event_synchronize(state->done);
    if (code != 0 && jobs_drop(&state->flags, code)) {
      memory->leave(previous);
      return false;
    }
    for (int i = 0; i < STREAMS; i++)
      if (state->streams[i] != NULL)
        memory->stream_synchronize(state->streams[i]), memory->stream_free(state->streams[i]);
    for (int i = 0; i < SLOTS * EVENTS; i++)
      if (events[i] != NULL) memory->event_free(events[i]);
    if (state->staging != NULL) memory->unpin(state->staging);
    for (int i = 0; i < state->outgrown_count; i++) memory->unpin(state->outgrown[i]);
    memory->event_free(state->done);
    flags_free(&state->flags);
    memory->leave(previous);
  }
  pthread_mutex_destroy(&state->taken);
  free(state);
  return true;
}

void transport_drain(void) {
  pthread_mutex_lock(&states_lock);
  struct stream_state *state = states; /* other threads add states in front; only transport_finish removes states */
  pthread_mutex_unlock(&states_lock);
  for (; state != NULL; state = state->next) {
    void *previous;
    if (state->memory->enter(state->context, &previous) != 0) continue;
    state->memory->event_synchronize(state->done);
    state->memory->leave(previous);
  }
}

void transport_finish(void) {
  pthread_mutex_lock(&states_lock);
  struct stream_state *state = states;
  states = NULL;
  pthread_mutex_unlock(&states_lock);
  while (state != NULL) {
    struct stream_state *next = state->next;
    pthread_mutex_lock(&state->taken);
    pthread_mutex_unlock(&state->taken);
    if (!state_free(state)) state_add(state);
    state = next;
  }
}

/* --- one operation --- */

/* Choose the transport of a staged call. Calls of other threads are not left to the stream (transport.h), nor are calls
 * in these cases. A user's reduction may need the GIL, which another thread may hold while it waits for the stream in
 * the driver. If ranks compare their calls, no chunk may be enqueued before they have agreed. Streams of some devices
 * take no calls. */
static enum transport transport_of(const struct call *call) {
  bool leaves = importer && call->reducer != REDUCER_USER && !call->comparison.due && call->memory->call != NULL;
  return leaves ? runtime.transport : TRANSPORT_WAIT;
}

/* Return whether an aware MPI can execute the call on device memory. It cannot if a function that reads host memory
 * reduces. It cannot if buffers must be packed first: joined buffers, buffers of a plan, and chunks of several rows. */
static bool within_reach(const struct call *call) {
  const struct division *division = &call->division;
  if (has_request(call->operation)) return false; /* data in flight is on the host */
  if (call->reducer != REDUCER_MPI || call->leaves != NULL || plan_of(call) != NULL) return false;
  return (division->rows_read == 1 && division->rows_written == 1) || division_is_one(division);
}

/* One operation. If it is not divided, `down`, `through` and `up` are all XLA's stream, because the order of that
 * stream suffices. Buffers for the core are staged in front of the slots. If MPI does not get device pointers, the
 * buffers for MPI are staged in each slot. */
struct stage {
  const struct call *call;
  struct stream_state *state;
  enum transport transport;
  bool aware;
  bool divided;
  int64_t chunks;
  size_t front, room;          /* bytes before the slots, and per slot */
  size_t offsets[MAX_BUFFERS]; /* of staged buffers */
  void *down, *through, *up;
};

static bool is_staged(const struct stage *stage, const struct buffer *buffer) {
  return buffer->count > 0 && (!stage->aware || role_is_of_host(buffer->role));
}

static void **events_of(const struct stage *stage, int64_t number) { return stage->state->events[number % SLOTS]; }

/* One chunk of a call: with pointers to device memory, and as MPI gets it. */
struct chunk {
  struct call device, call;
};

static void chunk_make(const struct stage *stage, int64_t number, struct chunk *chunk) {
  call_copy(&chunk->device, stage->call);
  if (stage->divided) call_cut(&chunk->device, number * stage->call->division.chunk);
  call_copy(&chunk->call, &chunk->device);
  struct call *call = &chunk->call;
  char *slot = stage->state->staging + stage->front + (size_t)(number % SLOTS) * stage->room * stage->divided;
  call->comparison.due = call->comparison.due && number == 0;
  if (!stage->aware) call->memory = &memory_host;
  for (int i = 0; i < call->buffer_count; i++)
    if (is_staged(stage, &call->buffers[i]))
      call->buffers[i].data =
          (role_is_of_host(call->buffers[i].role) ? stage->state->staging : slot) + stage->offsets[i];
}

/* Copy a buffer of a chunk down to the host, or up to the device. */
static int copy_buffer(const struct stage *stage, bool up, const struct buffer *host, const struct buffer *device) {
  size_t count = stage->divided ? (size_t)call_rows(stage->call, host) : 1, width = buffer_bytes(host) / count;
  size_t pitch = count > 1 ? (size_t)stage->call->division.columns * host->type->bytes : width;
  return memory_copy_rows(stage->call->memory, up, host->data, device->data,
                          (struct rows){width, count, width, (ptrdiff_t)pitch}, up ? stage->up : stage->down);
}

/* Copy a joined buffer down to the host, or up to the device, leaf by leaf. */
static int copy_leaves(const struct stage *stage, bool up, int buffer, const struct buffer *host) {
  int count, rows = call_rows(stage->call, host), code = 0;
  const struct buffer *leaf = leaves_of(stage->call, buffer, &count);
  size_t pitch = buffer_bytes(host) / (size_t)rows, at = 0;
  for (int k = 0; k < count && code == 0; k++) {
    size_t width = buffer_bytes(&leaf[k]) / (size_t)rows;
    if (width > 0)
      code =
          memory_copy_rows(stage->call->memory, up, (char *)host->data + at, leaf[k].data,
                           (struct rows){width, (size_t)rows, pitch, (ptrdiff_t)width}, up ? stage->up : stage->down);
    at += width;
  }
  return code;
}

/* Copy the staged buffers that the call reads down, or the staged buffers that it writes up. Of buffers for MPI, copy
 * the part of this chunk. Copy buffers for the core down with the first chunk, and up with the last. */
static ffi_error *copy_all(const struct stage *stage, bool up, int64_t number, const struct chunk *chunk) {
  int64_t with_core = up ? stage->chunks - 1 : 0;
  for (int i = 0; i < chunk->call.buffer_count; i++) {
    const struct buffer *host = &chunk->call.buffers[i];
    if (role_is_written(host->role) != up || !is_staged(stage, host)) continue;
    if (role_is_of_host(host->role) && number != with_core) continue;
    if (stage->call->leaves != NULL)
      TRY_DRIVER(stage->call, copy_leaves(stage, up, i, host));
    else
      TRY_DRIVER(stage->call, copy_buffer(stage, up, host, &chunk->device.buffers[i]));
  }
  return NULL;
}

/* Make later work of the stream `after` wait for the work enqueued on the stream `before` so far. */
static int order_streams(const struct stage *stage, void *before, void *event, void *after) {
  const struct memory *memory = stage->call->memory;
  if (before == after) return 0;
  int code = memory->event_record(event, before);
  return code != 0 ? code : memory->stream_wait(after, event);
}

static ffi_error *fetch_chunk(const struct stage *stage, int64_t number) {
  struct chunk chunk;
  chunk_make(stage, number, &chunk);
  void **events = events_of(stage, number);
  if (number >= SLOTS) TRY_DRIVER(stage->call, stage->call->memory->stream_wait(stage->down, events[STORED]));
  ffi_error *error = copy_all(stage, false, number, &chunk);
  if (error != NULL) return error;
  TRY_DRIVER(stage->call, order_streams(stage, stage->down, events[FETCHED], stage->through));
  return NULL;
}

static ffi_error *pass_chunk(const struct stage *stage, int64_t number) {
  const struct memory *memory = stage->call->memory;
  struct chunk chunk;
  chunk_make(stage, number, &chunk);
  if (stage->transport != TRANSPORT_WAIT) {
    struct flags *flags = stage->transport == TRANSPORT_FLAGS ? &stage->state->flags : NULL;
    return job_give(stage->call, &chunk.call, flags, stage->through);
  }
  void *ready = stage->divided ? events_of(stage, number)[FETCHED] : stage->state->done;
  if (!stage->divided) TRY_DRIVER(stage->call, memory->event_record(ready, stage->through));
  TRY_DRIVER(stage->call, memory->event_synchronize(ready));
  return stage->aware ? call_chunks(&chunk.call) : call_body(&chunk.call);
}

static ffi_error *store_chunk(const struct stage *stage, int64_t number) {
  struct chunk chunk;
  chunk_make(stage, number, &chunk);
  void **events = events_of(stage, number);
  TRY_DRIVER(stage->call, order_streams(stage, stage->through, events[PASSED], stage->up));
  ffi_error *error = copy_all(stage, true, number, &chunk);
  if (error != NULL) return error;
  if (stage->divided) TRY_DRIVER(stage->call, stage->call->memory->event_record(events[STORED], stage->up));
  return NULL;
}

/* Return the partner of `written`, the nth WRITE buffer: the index of the nth READ buffer if both have the same size,
 * and otherwise -1. */
static int partner_of(const struct call *call, int written) {
  int number = 0;
  for (int i = 0; i < written; i++) number += call->buffers[i].role == ROLE_WRITE;
  for (int i = 0; i < call->buffer_count; i++)
    if (call->buffers[i].role == ROLE_READ && number-- == 0)
      return buffer_bytes(&call->buffers[i]) == buffer_bytes(&call->buffers[written]) ? i : -1;
  return -1;
}

/* Set the offset of each staged buffer. In operations of divisibility CHUNKS a result shares the memory of the
 * operand, so that MPI works in place. */
static void lay_out(struct stage *stage) {
  struct call first; /* the largest chunk */
  call_copy(&first, stage->call);
  if (stage->divided) call_cut(&first, 0);
  bool in_place = stage->call->operation->divisibility == DIVIDE_CHUNKS;
  stage->front = 0;
  stage->room = 0;
  for (int i = 0; i < first.buffer_count; i++) {
    const struct buffer *buffer = &first.buffers[i];
    stage->offsets[i] = 0;
    if (!is_staged(stage, buffer)) continue;
    int partner = in_place && buffer->role == ROLE_WRITE ? partner_of(&first, i) : -1;
    size_t *end = role_is_of_host(buffer->role) ? &stage->front : &stage->room;
    stage->offsets[i] = partner < 0 ? memory_aligned(*end) : stage->offsets[partner];
    if (partner < 0) *end = stage->offsets[i] + buffer_bytes(buffer);
  }
  stage->front = memory_aligned(stage->front);
  if (stage->divided) stage->room = memory_aligned(stage->room);
}

/* Make the flags of the state. On a device without flags use a callback, unless the user has asked for flags. */
static ffi_error *prepare_flags(struct stage *stage) {
  struct flags *flags = &stage->state->flags;
  TRY_DRIVER(stage->call, flags_make(flags, stage->call->memory, stage->call->stream));
  if (flags->refused && runtime.flags_asked)
    return call_fail(stage->call, FFI_FAILED_PRECONDITION,
                     "JAXMPI_DEVICE_TRANSPORT=flags is not possible: streams of this device cannot wait for a value in "
                     "memory. Leave the variable out");
  if (flags->refused) stage->transport = TRANSPORT_CALLBACK;
  return NULL;
}

static ffi_error *prepare_stage(struct stage *stage, struct stream_state *state, const struct call *call) {
  stage->call = call;
  stage->state = state;
  stage->aware = runtime.aware && within_reach(call);
  stage->transport = stage->aware ? TRANSPORT_WAIT : transport_of(call);
  if (stage->transport == TRANSPORT_FLAGS) {
    ffi_error *error = prepare_flags(stage);
    if (error != NULL) return error;
  }
  stage->divided = !stage->aware && !division_is_one(&call->division);
  stage->chunks = stage->divided ? (call->division.columns + call->division.chunk - 1) / call->division.chunk : 1;
  stage->down = stage->through = stage->up = call->stream;
  lay_out(stage);
  TRY_DRIVER(call, state_reserve(state, stage->front + (stage->divided ? SLOTS : 1) * stage->room));
  if (!stage->divided) return NULL;
  TRY_DRIVER(call, state_divide(state));
  stage->down = state->streams[DOWN];
  stage->through = state->streams[THROUGH];
  stage->up = state->streams[UP];
  return NULL;
}

static ffi_error *run_chunks(const struct stage *stage) {
  const struct call *call = stage->call;
  TRY_DRIVER(call, order_streams(stage, call->stream, stage->state->done, stage->down));
  ffi_error *error = fetch_chunk(stage, 0);
  for (int64_t i = 0; i < stage->chunks && error == NULL; i++) {
    if (i + 1 < stage->chunks) error = fetch_chunk(stage, i + 1); /* the device copies it while MPI has chunk i */
    if (error == NULL) error = pass_chunk(stage, i);
    if (error == NULL) error = store_chunk(stage, i);
  }
  if (error != NULL) return error;
  if (stage->divided)
    TRY_DRIVER(call, call->memory->stream_wait(call->stream, events_of(stage, stage->chunks - 1)[STORED]));
  bool waited = stage->aware && stage->front + stage->room == 0; /* this thread, for MPI; nothing was staged */
  if (!waited) TRY_DRIVER(call, call->memory->event_record(stage->state->done, call->stream));
  return NULL;
}

static ffi_error *run_in_state(struct stream_state *state, const struct call *call) {
  struct stage stage;
  ffi_error *error = prepare_stage(&stage, state, call);
  if (error == NULL) error = run_chunks(&stage);
  if (error != NULL) state_drain(state); /* after the return XLA may reuse the buffers */
  return error;                          /* cppcheck-suppress returnDanglingLifetime ; no error points to the call */
}

/* Enqueue a call that NCCL carries. */
static ffi_error *run_by_nccl(struct stream_state *state, struct call *call) {
  call->context = state->context;
  const struct plan *plan = plan_of(call);
  ffi_error *error = plan != NULL ? plan_check(call, plan, true, true) : NULL;
  if (error == NULL) error = call_body(call);
  if (error != NULL) return error;
  int code = call->memory->event_record(state->done, call->stream);
  if (code == 0) return NULL;
  error = call_fail_driver(call, call->memory, code);
  state_drain(state);
  return error;
}

ffi_error *transport_run(struct call *call) {
  const struct memory *memory = call->memory;
  ffi_stream_get_args stream = {sizeof stream, NULL, call->frame->context, NULL};
  ffi_error *error = call->frame->api->stream_get(&stream);
  if (error != NULL) return error; /* cppcheck-suppress returnDanglingLifetime ; it is XLA's own */
  call->stream = stream.stream;
  void *context, *previous;
  struct stream_state *state;
  TRY_DRIVER(call, memory->context(call->stream, &context));
  TRY_DRIVER(call, memory->enter(context, &previous));
  int code = state_take(call, context, &state);
  if (code != 0) {
    error = code == -1 ? call_fail(call, FFI_INTERNAL, "no memory") : call_fail_driver(call, memory, code);
  } else {
    error = call->by_nccl ? run_by_nccl(state, call) : run_in_state(state, call);
    pthread_mutex_unlock(&state->taken);
  }
  code = memory->leave(previous);
  if (error == NULL && code != 0) error = call_fail_driver(call, memory, code);
  return error;
}
