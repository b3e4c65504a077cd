#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "call.h"

enum { SLOTS = 4, ALIGNMENT = 256, LEAST = 1 << 16, OUTGROWN = 48 };

/* Where pieces go: streams of a lane, in this order. Each piece that is under way marks what has been done with it. */
enum { DOWN, THROUGH, UP, STREAMS };
enum { FETCHED, PASSED, STORED, MARKS };

/* What the operations of one stream share, one after the other: pinned memory above all. Its order is that of the
 * stream, so that an operation may be given to the stream while an earlier one still uses the same memory. A thread
 * that finds all lanes of a stream taken gets another. */
struct lane {
  struct lane *next;
  pthread_mutex_t taken;
  const struct memory *memory;
  void *stream;  /* XLA's */
  void *context; /* of the stream */
  void *done;    /* event: the end of what was given so far */
  char *staging;
  size_t capacity;
  void *streams[STREAMS], *events[SLOTS][MARKS]; /* for pieces, once there have been some */
  /* Pinned memory that was too small. Giving it back makes a driver wait for all streams of the device, and some of
   * them may wait for MPI, so that is left to the end; all of it together is smaller than what has taken its place. */
  void *outgrown[OUTGROWN];
  int outgrown_count;
};

static struct lane *lanes;
static pthread_mutex_t lanes_lock = PTHREAD_MUTEX_INITIALIZER;

#define TRY(call, expression)                                             \
  do {                                                                    \
    int code_ = (expression);                                             \
    if (code_ != 0) return call_fail_driver(call, (call)->memory, code_); \
  } while (0)

/* --- lanes --- */

static int lane_make(const struct memory *memory, void *stream, void *context, struct lane **made) {
  struct lane *lane = calloc(1, sizeof *lane);
  int code;
  if (lane == NULL) return -1;
  if ((code = memory->event_make(&lane->done)) != 0) {
    free(lane);
    return code;
  }
  pthread_mutex_init(&lane->taken, NULL);
  lane->memory = memory;
  lane->stream = stream;
  lane->context = context;
  pthread_mutex_lock(&lane->taken);
  pthread_mutex_lock(&lanes_lock);
  lane->next = lanes;
  lanes = lane;
  pthread_mutex_unlock(&lanes_lock);
  *made = lane;
  return 0;
}

/* A lane for the stream of the call, for this thread alone until it is let go. */
static int lane_take(const struct call *call, void *context, struct lane **taken) {
  pthread_mutex_lock(&lanes_lock);
  struct lane *lane = lanes;
  while (lane != NULL && (lane->stream != call->stream || lane->context != context || lane->memory != call->memory ||
                          pthread_mutex_trylock(&lane->taken) != 0))
    lane = lane->next;
  pthread_mutex_unlock(&lanes_lock);
  *taken = lane;
  return lane != NULL ? 0 : lane_make(call->memory, call->stream, context, taken);
}

static void lane_leave(struct lane *lane) { pthread_mutex_unlock(&lane->taken); }

/* Pinned memory of at least that size, which grows by doubling. */
static int lane_reserve(struct lane *lane, size_t bytes) {
  if (bytes <= lane->capacity) return 0;
  size_t capacity = lane->capacity > 0 ? lane->capacity : LEAST;
  while (capacity < bytes) capacity *= 2;
  void *made = NULL;
  int code = lane->memory->pin(&made, capacity);
  if (code != 0) return code;
  if (lane->staging != NULL) lane->outgrown[lane->outgrown_count++] = lane->staging;
  lane->staging = made;
  lane->capacity = capacity;
  return 0;
}

/* Streams and marks for pieces. What a failure leaves half made is used by the next call and freed in the end. */
static int lane_divide(struct lane *lane) {
  const struct memory *memory = lane->memory;
  void **events = lane->events[0];
  int code = 0;
  for (int i = 0; i < STREAMS && code == 0; i++)
    if (lane->streams[i] == NULL) code = memory->stream_make(&lane->streams[i]);
  for (int i = 0; i < SLOTS * MARKS && code == 0; i++)
    if (events[i] == NULL) code = memory->event_make(&events[i]);
  return code;
}

/* Waits for all that was given to the lane, whatever has failed. */
static void lane_drain(struct lane *lane) {
  for (int i = 0; i < STREAMS; i++)
    if (lane->streams[i] != NULL) lane->memory->stream_finish(lane->streams[i]);
  lane->memory->stream_finish(lane->stream);
}

static void lane_free(struct lane *lane) {
  const struct memory *memory = lane->memory;
  void **events = lane->events[0], *previous;
  if (memory->enter(lane->context, &previous) == 0) {
    memory->event_finish(lane->done);
    for (int i = 0; i < STREAMS; i++)
      if (lane->streams[i] != NULL) memory->stream_finish(lane->streams[i]), memory->stream_free(lane->streams[i]);
    for (int i = 0; i < SLOTS * MARKS; i++)
      if (events[i] != NULL) memory->event_free(events[i]);
    if (lane->staging != NULL) memory->unpin(lane->staging);
    for (int i = 0; i < lane->outgrown_count; i++) memory->unpin(lane->outgrown[i]);
    memory->event_free(lane->done);
    memory->leave(previous);
  }
  pthread_mutex_destroy(&lane->taken);
  free(lane);
}

void device_drain(void) {
  pthread_mutex_lock(&lanes_lock);
  struct lane *lane = lanes; /* those behind it stay where they are */
  pthread_mutex_unlock(&lanes_lock);
  for (; lane != NULL; lane = lane->next) {
    void *previous;
    if (lane->memory->enter(lane->context, &previous) != 0) continue;
    lane->memory->event_finish(lane->done);
    lane->memory->leave(previous);
  }
}

void device_finish(void) {
  pthread_mutex_lock(&lanes_lock);
  struct lane *lane = lanes;
  lanes = NULL;
  pthread_mutex_unlock(&lanes_lock);
  while (lane != NULL) {
    struct lane *next = lane->next;
    pthread_mutex_lock(&lane->taken);
    pthread_mutex_unlock(&lane->taken);
    lane_free(lane);
    lane = next;
  }
}

/* --- calls of MPI that nobody waits for --- */

struct job {
  struct job *next;
  struct call call;
  bool done;
};

/* The thread of ROAD_THREAD, and the jobs that are not in use. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t posted, finished;
  struct job *spare, *first, **last;
  bool running;
} jobs = {.lock = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER};

static struct job *job_new(const struct call *call) {
  pthread_mutex_lock(&jobs.lock);
  struct job *job = jobs.spare;
  if (job != NULL) jobs.spare = job->next;
  pthread_mutex_unlock(&jobs.lock);
  if (job == NULL) job = malloc(sizeof *job);
  if (job == NULL) return NULL;
  job->next = NULL;
  job->call = *call;
  job->call.frame = NULL;
  job->done = false;
  return job;
}

static void job_free(struct job *job) {
  pthread_mutex_lock(&jobs.lock);
  job->next = jobs.spare;
  jobs.spare = job;
  pthread_mutex_unlock(&jobs.lock);
}

static void job_run(struct job *job) {
  struct call *call = &job->call;
  /* The communicator may have been freed meanwhile. */
  ffi_error *error = call->operation->division == LOCAL ? NULL : call_check(call);
  if (error == NULL) error = call_body(call);
  if (error != NULL && call->out.count > 0)
    memset(call->out.data, 0xff, (size_t)call->out.count * call->out.type->bytes);
}

/* A host function: calls MPI in the driver's thread. */
static void callback(void *data) {
  job_run(data);
  job_free(data);
}

static void *work(void *unused) {
  (void)unused;
  pthread_mutex_lock(&jobs.lock);
  for (;;) {
    while (jobs.first == NULL) pthread_cond_wait(&jobs.posted, &jobs.lock);
    struct job *job = jobs.first;
    jobs.first = job->next;
    pthread_mutex_unlock(&jobs.lock);
    job_run(job);
    pthread_mutex_lock(&jobs.lock);
    job->done = true;
    pthread_cond_broadcast(&jobs.finished);
  }
  return NULL;
}

/* A host function: lets our thread call MPI, and waits for it. */
static void hand_over(void *data) {
  struct job *job = data;
  pthread_mutex_lock(&jobs.lock);
  if (jobs.first == NULL) jobs.last = &jobs.first;
  *jobs.last = job;
  jobs.last = &job->next;
  pthread_cond_signal(&jobs.posted);
  while (!job->done) pthread_cond_wait(&jobs.finished, &jobs.lock);
  pthread_mutex_unlock(&jobs.lock);
  job_free(job);
}

static bool start_thread(void) {
  pthread_mutex_lock(&jobs.lock);
  if (!jobs.running) {
    pthread_t thread;
    jobs.running = pthread_create(&thread, NULL, work, NULL) == 0 && pthread_detach(thread) == 0;
  }
  bool running = jobs.running;
  pthread_mutex_unlock(&jobs.lock);
  return running;
}

static ffi_error *give_job(const struct call *call, const struct call *part, bool thread, void *stream) {
  struct job *job = !thread || start_thread() ? job_new(part) : NULL;
  if (job == NULL) return call_fail(call, FFI_INTERNAL, "no memory or no thread for a call of MPI");
  int code = call->memory->call(stream, thread ? hand_over : callback, job);
  if (code == 0) return NULL;
  job_free(job);
  return call_fail_driver(call, call->memory, code);
}

/* --- the staged road --- */

/* Who reduces; MPI where the operation is none that reduces. */
static enum reducer reducer(const struct call *call) {
  const struct operation *operation = call->operation;
  for (int i = 0; i < operation->attribute_count; i++) {
    if (strcmp(operation->attributes[i].name, "op") != 0) continue;
    return ((const struct reduction *)object_of(call->attributes[i]))->by;
  }
  return REDUCER_MPI;
}

/* A user's reduction may need the GIL, which another thread may hold while it waits for the stream in the driver. Where
 * ranks compare what they do, the pieces behind one that they do not agree about must not be under way. */
static enum road road_of(const struct call *call) {
  return importer && reducer(call) != REDUCER_USER && !call->compared ? runtime.road : ROAD_WAIT;
}

/* One operation on its way. Without pieces all streams are XLA's, whose order is enough. */
struct stage {
  const struct call *call;
  struct lane *lane;
  enum road road;
  struct division_of division;
  bool divided;
  size_t room;       /* bytes of a slot */
  size_t out_offset; /* of the result in it */
  void *down, *through, *up;
};

static size_t bytes_of(const struct side *side) {
  return side->type == NULL ? 0 : (size_t)side->count * side->type->bytes;
}

static void **events_of(const struct stage *stage, int64_t number) { return stage->lane->events[number % SLOTS]; }

/* The call of one piece, on host memory; what lies on the device goes to `device`. */
static struct call piece_of(const struct stage *stage, int64_t number, struct call *device) {
  *device = *stage->call;
  if (stage->divided) call_cut(device, &stage->division, number * stage->division.piece);
  struct call part = *device;
  char *memory = stage->lane->staging + (stage->divided ? (size_t)(number % SLOTS) * stage->room : 0);
  part.memory = &memory_host;
  part.compared = part.compared && number == 0;
  if (part.in.count > 0) part.in.data = memory;
  if (part.out.count > 0) part.out.data = memory + stage->out_offset;
  return part;
}

/* A side of one piece down to the host, or up to the device. */
static int copy(const struct stage *stage, bool up, const struct side *host, const struct side *device, void *stream) {
  const struct memory *memory = stage->call->memory;
  size_t rows = 1, width = bytes_of(host), pitch = 0;
  if (stage->divided) rows = (size_t)(up ? stage->division.out_rows : stage->division.in_rows);
  if (rows > 1) width /= rows, pitch = (size_t)stage->division.columns * stage->division.element;
  bool each = pitch > MAX_PITCH;
  int code = 0;
  for (size_t i = 0; i < (each ? rows : 1) && code == 0; i++) {
    char *on_host = (char *)host->data + i * width, *on_device = (char *)device->data + i * pitch;
    if (up)
      code = memory->copy_up(on_device, on_host, width, each ? 1 : rows, pitch, stream);
    else
      code = memory->copy_down(on_host, on_device, width, each ? 1 : rows, pitch, stream);
  }
  return code;
}

/* Later work of the stream `after` waits for what the stream `before` has been given so far. */
static int order(const struct stage *stage, void *before, void *event, void *after) {
  const struct memory *memory = stage->call->memory;
  if (before == after) return 0;
  int code = memory->event_mark(event, before);
  return code != 0 ? code : memory->stream_wait(after, event);
}

static ffi_error *fetch(const struct stage *stage, int64_t number) {
  const struct memory *memory = stage->call->memory;
  struct call device, part = piece_of(stage, number, &device);
  void **events = events_of(stage, number);
  if (number >= SLOTS) TRY(stage->call, memory->stream_wait(stage->down, events[STORED]));
  if (part.in.count > 0) TRY(stage->call, copy(stage, false, &part.in, &device.in, stage->down));
  TRY(stage->call, order(stage, stage->down, events[FETCHED], stage->through));
  return NULL;
}

static ffi_error *pass(const struct stage *stage, int64_t number) {
  const struct memory *memory = stage->call->memory;
  struct call device, part = piece_of(stage, number, &device);
  if (stage->road != ROAD_WAIT) return give_job(stage->call, &part, stage->road == ROAD_THREAD, stage->through);
  void *ready = stage->divided ? events_of(stage, number)[FETCHED] : stage->lane->done;
  if (!stage->divided) TRY(stage->call, memory->event_mark(ready, stage->through));
  TRY(stage->call, memory->event_finish(ready));
  return call_body(&part);
}

static ffi_error *store(const struct stage *stage, int64_t number) {
  const struct memory *memory = stage->call->memory;
  struct call device, part = piece_of(stage, number, &device);
  void **events = events_of(stage, number);
  TRY(stage->call, order(stage, stage->through, events[PASSED], stage->up));
  if (part.out.count > 0) TRY(stage->call, copy(stage, true, &part.out, &device.out, stage->up));
  if (stage->divided) TRY(stage->call, memory->event_mark(events[STORED], stage->up));
  return NULL;
}

static ffi_error *prepare(struct stage *stage, struct lane *lane, const struct call *call) {
  *stage = (struct stage){.call = call, .lane = lane, .road = road_of(call)};
  stage->division = call_division(call);
  stage->divided = stage->division.columns > stage->division.piece;
  size_t in = bytes_of(&call->in), out = bytes_of(&call->out);
  /* Where operand and result are alike MPI works in place. */
  bool one = call->operation->division == PIECES;
  if (stage->divided) {
    struct call first = *call;
    call_cut(&first, &stage->division, 0);
    in = bytes_of(&first.in);
    out = bytes_of(&first.out);
  }
  if (!one && out > 0) stage->out_offset = (in + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  stage->room = one ? (in > out ? in : out) : stage->out_offset + (out > 0 ? out : in);
  stage->down = stage->through = stage->up = call->stream;
  TRY(call, lane_reserve(lane, stage->divided ? SLOTS * stage->room : stage->room));
  if (!stage->divided) return NULL;
  TRY(call, lane_divide(lane));
  stage->down = lane->streams[DOWN];
  stage->through = lane->streams[THROUGH];
  stage->up = lane->streams[UP];
  return NULL;
}

static ffi_error *staged(const struct call *call, struct lane *lane) {
  struct stage stage;
  ffi_error *error = prepare(&stage, lane, call);
  if (error != NULL) return error;
  int64_t piece = stage.division.piece, pieces = stage.divided ? (stage.division.columns + piece - 1) / piece : 1;
  int code = order(&stage, call->stream, lane->done, stage.down);
  if (code != 0) return call_fail_driver(call, call->memory, code);
  error = fetch(&stage, 0);
  for (int64_t i = 0; i < pieces && error == NULL; i++) {
    if (i + 1 < pieces) error = fetch(&stage, i + 1); /* under way while this thread is with MPI */
    if (error == NULL) error = pass(&stage, i);
    if (error == NULL) error = store(&stage, i);
  }
  if (error == NULL && stage.divided &&
      (code = call->memory->stream_wait(call->stream, events_of(&stage, pieces - 1)[STORED])) != 0)
    error = call_fail_driver(call, call->memory, code);
  if (error == NULL && (code = call->memory->event_mark(lane->done, call->stream)) != 0)
    error = call_fail_driver(call, call->memory, code);
  if (error != NULL) lane_drain(lane); /* XLA takes the buffers back */
  return error;
}

/* --- the choice --- */

/* Whether MPI can do it on the device's memory: not a reduction by a function that reads host memory, not what
 * communicates nothing, and not pieces of several rows, which have to be gathered. */
static bool within_reach(const struct call *call) {
  struct division_of division = call_division(call);
  bool rows = division.in_rows > 1 || division.out_rows > 1;
  if (rows && division.columns > division.piece) return false;
  return call->operation->division != LOCAL && reducer(call) == REDUCER_MPI;
}

static ffi_error *aware(struct call *call, struct lane *lane) {
  TRY(call, call->memory->event_mark(lane->done, call->stream));
  TRY(call, call->memory->event_finish(lane->done));
  return call_pieces(call);
}

ffi_error *device_run(struct call *call) {
  const struct memory *memory = call->memory;
  ffi_stream_get_args stream = {sizeof stream, NULL, call->frame->context, NULL};
  ffi_error *error = call->frame->api->stream_get(&stream);
  if (error != NULL) return error; /* cppcheck-suppress returnDanglingLifetime ; it is XLA's own */
  call->stream = stream.stream;
  void *context, *previous;
  struct lane *lane;
  TRY(call, memory->context(call->stream, &context));
  TRY(call, memory->enter(context, &previous));
  int code = lane_take(call, context, &lane);
  if (code != 0) {
    error = code == -1 ? call_fail(call, FFI_INTERNAL, "no memory") : call_fail_driver(call, memory, code);
  } else {
    error = runtime.aware && within_reach(call) ? aware(call, lane) : staged(call, lane);
    lane_leave(lane);
  }
  code = memory->leave(previous);
  if (error == NULL && code != 0) error = call_fail_driver(call, memory, code);
  return error;
}
