/* Lets XLA's CPU backend drive the handlers for a device's memory, on the fake driver.
 *
 * bridge_NAME is registered with XLA for the platform "cpu" and calls the device handler that bridge_set names, with a
 * copy of the frame: its buffers are in fake device memory, and the runtime's functions return a fake stream. The rest
 * of the frame is XLA's. Before it returns it waits for the stream and copies the results back. So it must not leave an
 * error to a later operation: it fetches a deferred one by the operation `check`, with nothing to check.
 *
 * An empty buffer is at NULL. If XLA has aliased an operand and a result, they are aliased on the device too.
 *
 * There is one stream for the process, as XLA has one per device; with BRIDGE_STREAMS=thread in the environment each
 * thread has its own. Nothing is locked here, since one call may wait for another. But calls of two threads that wait
 * for each other on one stream deadlock, as on a real stream.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_driver.h"
#include "base/ffi.h"

#define EXPORT __attribute__((visibility("default")))

enum { MAX_BUFFERS = 256, API_BYTES = 1024, ERASED = 0xee, BOOL = 1 };

enum {
#define OPERATION(name, ...) ROW_##name,
#include "core/ops.def"
#undef OPERATION
  ROWS
};

static const char *const names[] = {
#define OPERATION(name, ...) #name,
#include "core/ops.def"
#undef OPERATION
};

static struct fake_driver *driver;
static ffi_handler *handlers[ROWS]; /* for the device */

/* --- the runtime in front of the device handlers --- */

static void *shared_stream;
static void make_shared_stream(void) { shared_stream = driver->stream(); }

static void *stream_now(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static _Thread_local __attribute__((tls_model("initial-exec"))) void *own; /* as in fake_driver.c */
  const char *mode = getenv("BRIDGE_STREAMS");
  if (mode == NULL || strcmp(mode, "thread") != 0) {
    pthread_once(&once, make_shared_stream);
    return shared_stream;
  }
  if (own == NULL) own = driver->stream();
  return own;
}

static ffi_error *stream_get(ffi_stream_get_args *args) {
  args->stream = stream_now();
  return NULL;
}

/* A copy of the runtime's structure, of which ffi_api is but the beginning. */
union api {
  ffi_api api;
  char bytes[API_BYTES];
};

static ffi_error *fail(const ffi_frame *frame, const char *what, int code) {
  char text[256];
  snprintf(text, sizeof text, "bridge: %s (%d)", what, code);
  ffi_error_create_args args = {sizeof args, NULL, text, FFI_INTERNAL};
  return frame->api->error_create(&args);
}

/* --- buffers --- */

/* The buffers of one side of a frame, on the device. */
struct side {
  int64_t size;
  ffi_buffer buffers[MAX_BUFFERS];
  void *pointers[MAX_BUFFERS];
  void *hosts[MAX_BUFFERS]; /* where XLA has them; NULL: nothing to copy */
  size_t bytes[MAX_BUFFERS];
  bool borrowed[MAX_BUFFERS]; /* the memory is an operand's */
};

/* Of all elements; 0 for a token, and for a type that the core does not know either. */
static size_t bytes_of(const ffi_buffer *buffer) {
  size_t element = 0;
  switch (buffer->dtype) {
#define DATATYPE(code, name, bytes, mpi, kind) \
  case code:                                   \
    element = bytes;                           \
    break;
#include "core/dtype.def"
#undef DATATYPE
    default:
      return 0;
  }
  for (int64_t i = 0; i < buffer->rank; i++) element *= (size_t)buffer->dims[i];
  return element;
}

/* Replaces the buffers of `list` by such on the device. `operands`: NULL if `list` has them. */
static bool side_make(struct side *side, ffi_buffers *list, const struct side *operands) {
  for (; side->size < list->size; side->size++) {
    int64_t i = side->size;
    ffi_buffer *buffer = &side->buffers[i];
    *buffer = *(const ffi_buffer *)list->buffers[i];
    side->pointers[i] = buffer;
    side->bytes[i] = bytes_of(buffer);
    side->hosts[i] = side->bytes[i] > 0 ? buffer->data : NULL;
    side->borrowed[i] = false;
    buffer->data = NULL;
    if (side->hosts[i] == NULL) continue;
    for (int64_t k = 0; operands != NULL && k < operands->size; k++)
      if (operands->hosts[k] == side->hosts[i] && operands->bytes[k] >= side->bytes[i]) {
        buffer->data = operands->buffers[k].data;
        side->borrowed[i] = true;
      }
    if (side->borrowed[i]) continue;
    if ((buffer->data = driver->allocate(side->bytes[i])) == NULL) return false;
    if (operands == NULL)
      driver->write(buffer->data, side->hosts[i], side->bytes[i]);
    else
      memset(driver->reach(buffer->data), ERASED, side->bytes[i]);
  }
  list->buffers = side->pointers;
  return true;
}

static void side_fetch(const struct side *side) {
  for (int64_t i = 0; i < side->size; i++)
    if (side->hosts[i] != NULL) driver->read(side->hosts[i], side->buffers[i].data, side->bytes[i]);
}

static void side_free(const struct side *side) {
  for (int64_t i = 0; i < side->size; i++)
    if (!side->borrowed[i]) driver->release(side->buffers[i].data);
}

/* --- calls --- */

/* The error that an operation of this communicator has left to the next one. */
static ffi_error *deferred(const ffi_frame *call) {
  int64_t none = 0;
  ffi_buffer buffer = {sizeof buffer, NULL, BOOL, NULL, 1, &none};
  void *buffers[] = {&buffer};
  int buffer_types[] = {0}, types[] = {FFI_ATTRIBUTE_SCALAR, FFI_ATTRIBUTE_SCALAR};
  ffi_span spans[] = {{"comm", 4}, {"text", 4}}, *span_list[] = {&spans[0], &spans[1]};
  ffi_scalar text = {FFI_DTYPE_S64, &none};
  void *values[] = {call->attributes.values[0], &text}; /* sorted by name: comm is the first of each operation */
  ffi_frame frame = *call;
  frame.operands = (ffi_buffers){sizeof frame.operands, NULL, 1, buffer_types, buffers};
  frame.results = (ffi_buffers){sizeof frame.results, NULL, 0, NULL, NULL};
  frame.attributes = (ffi_attributes){sizeof frame.attributes, NULL, 2, types, span_list, values};
  return handlers[ROW_check](&frame);
}

/* A thread that executes what NCCL may carry, one call after the other, as the one thread of a program whose stream is
 * a device's. XLA's CPU backend executes in threads of its own. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  ffi_frame *frame; /* NULL: none waits */
  int row;
  bool started, done;
  ffi_error *error;
} one = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void *run_one(void *unused) {
  pthread_mutex_lock(&one.lock);
  for (;;) {
    while (one.frame == NULL || one.done) pthread_cond_wait(&one.changed, &one.lock);
    pthread_mutex_unlock(&one.lock);
    ffi_error *error = handlers[one.row](one.frame);
    pthread_mutex_lock(&one.lock);
    one.error = error;
    one.done = true;
    pthread_cond_broadcast(&one.changed);
  }
  return unused;
}

static ffi_error *execute_in_one(ffi_frame *frame, int row) {
  pthread_t thread;
  pthread_mutex_lock(&one.lock);
  if (!one.started) one.started = pthread_create(&thread, NULL, run_one, NULL) == 0;
  while (one.frame != NULL) pthread_cond_wait(&one.changed, &one.lock);
  one.frame = frame, one.row = row, one.done = false;
  pthread_cond_broadcast(&one.changed);
  while (!one.done) pthread_cond_wait(&one.changed, &one.lock);
  ffi_error *error = one.error;
  one.frame = NULL;
  pthread_cond_broadcast(&one.changed);
  pthread_mutex_unlock(&one.lock);
  return error;
}

static ffi_error *execute(ffi_frame *frame, int row) {
  enum { MPI, NCCL };
  static const int engines[] = {
#define OPERATION(name, engine, ...) engine,
#include "core/ops.def"
#undef OPERATION
  };
  const char *wish = getenv("JAXMPI_DEVICE_TRANSPORT");
  bool by_one = engines[row] == NCCL && wish != NULL && strcmp(wish, "nccl") == 0;
  ffi_error *error = by_one ? execute_in_one(frame, row) : handlers[row](frame);
  int code = driver->synchronize(stream_now());
  if (error == NULL && code != 0) error = fail(frame, "work on the stream has failed", code);
  if (error == NULL && row != ROW_check && handlers[ROW_check] != NULL) error = deferred(frame);
  return error;
}

static ffi_error *run(ffi_frame *given, int row) {
  if (driver == NULL || handlers[row] == NULL) return fail(given, "there is no driver, or no handler", row);
  bool asked = given->extension != NULL && given->extension->type == FFI_EXTENSION_METADATA;
  if (asked || given->stage != FFI_STAGE_EXECUTE) return handlers[row](given);
  if (given->operands.size > MAX_BUFFERS || given->results.size > MAX_BUFFERS || given->api->struct_size > API_BYTES)
    return fail(given, "a frame is larger than expected", row);
  union api api;
  memcpy(api.bytes, given->api, given->api->struct_size);
  api.api.stream_get = stream_get;
  ffi_frame frame = *given;
  frame.api = &api.api;
  struct side in, out;
  in.size = out.size = 0;
  ffi_error *error;
  if (side_make(&in, &frame.operands, NULL) && side_make(&out, &frame.results, &in))
    error = execute(&frame, row);
  else
    error = fail(given, "no memory for the buffers", row);
  if (error == NULL) side_fetch(&out);
  side_free(&out);
  side_free(&in);
  return error;
}

#define OPERATION(name, ...) \
  static ffi_error *bridge_##name(ffi_frame *frame) { return run(frame, ROW_##name); }
#include "core/ops.def"
#undef OPERATION

/* --- what a test calls --- */

static int row_of(const char *operation) {
  int row = 0;
  while (row < ROWS && strcmp(names[row], operation) != 0) row++;
  return row;
}

/* Loads the fake driver, before the core looks for one: 0, or -1 and a line that says why not. */
EXPORT int bridge_open(const char *driver_path) {
  void *library = dlopen(driver_path, RTLD_GLOBAL | RTLD_NOW);
  struct fake_driver *(*control)(void) = NULL;
  if (library != NULL) *(void **)&control = dlsym(library, "fake_driver");
  if (control == NULL) {
    fprintf(stderr, "bridge: %s\n", dlerror());
    return -1;
  }
  driver = control();
  return 0;
}

EXPORT void bridge_set(const char *operation, void *device_handler) {
  int row = row_of(operation);
  if (row < ROWS) *(void **)&handlers[row] = device_handler;
}

/* The handler to be registered; NULL where there is no such operation. */
EXPORT void *bridge_handler(const char *operation) {
  static ffi_handler *const table[] = {
#define OPERATION(name, ...) bridge_##name,
#include "core/ops.def"
#undef OPERATION
  };
  int row = row_of(operation);
  return row < ROWS ? *(void *const *)&table[row] : NULL;
}

EXPORT int bridge_violations(void) { return driver->violations; }
EXPORT const char *bridge_violation(void) { return driver->violation; }

/* What the core has taken of the driver and not given back; device memory, which is XLA's, apart. */
EXPORT int bridge_live(void) { return driver->live_pinned + driver->live_events + driver->live_streams; }
EXPORT int bridge_live_device(void) { return driver->live_device; }
