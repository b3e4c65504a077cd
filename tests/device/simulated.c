#include "simulated.h"

#include <dlfcn.h>

#include "core/failure.h"
#include "devices/nccl.h"
#include "devices/transport.h"

struct fake_driver *driver;
const struct memory *space;

void finish(void) {
  nccl_finish();
  transport_finish();
  CHECK_EQUAL(driver->live_pinned, 0);
  CHECK_EQUAL(driver->live_events, 0);
  CHECK_EQUAL(driver->live_streams, 0);
  CHECK_EQUAL(driver->live_device, 0);
  CHECK_EQUAL(driver->depth(), 0);
  if (!CHECK_EQUAL(driver->violations, 0)) printf("%s\n", driver->violation);
  CHECK(failure_take() == NULL);
  driver->reset();
}

void check_after(void) { finish(); }

const enum transport transports[] = {TRANSPORT_CALLBACK, TRANSPORT_FLAGS, TRANSPORT_WAIT};
const enum transport leaving[] = {TRANSPORT_CALLBACK, TRANSPORT_FLAGS};
const char *const transport_names[] = {
    [TRANSPORT_CALLBACK] = "callback", [TRANSPORT_FLAGS] = "flags", [TRANSPORT_WAIT] = "wait"};

void on(enum transport transport, bool aware) {
  runtime.transport = transport;
  runtime.aware = aware;
}

static void on_each(const enum transport list[], size_t count, void (*test)(void)) {
  for (size_t i = 0; i < count; i++) {
    if (list[i] != TRANSPORT_WAIT && space->call == NULL) continue;
    context("transport %s", transport_names[list[i]]);
    fake->reset();
    on(list[i], false);
    test();
    finish();
  }
}

void where_calls_are_left(void (*test)(void)) {
  if (space->call != NULL) test();
}

int calls(const char *cuda, const char *hip, const char *sycl) {
  return driver->calls(space == &memory_cuda ? cuda : space == &memory_rocm ? hip : sycl);
}

void on_all(void (*test)(void)) { on_each(transports, 3, test); }
void on_leaving(void (*test)(void)) { on_each(leaving, 2, test); }

struct array array_of(int dtype, void *data, int64_t count) {
  return count < 0 ? NONE : ARRAY(dtype, count > 0 ? data : NULL, count);
}

size_t array_bytes(int dtype, int64_t count) { return count < 0 ? 0 : (size_t)count * datatype_find(dtype)->bytes; }

ffi_error *give(const char *operation, struct array in, struct array out, const int64_t attributes[]) {
  struct frame frame;
  frame_make(&frame, operation, in, out, attributes);
  ffi_error *error = frame_call_in(space, &frame, operation);
  memset(&frame, 0xaa, sizeof frame); /* XLA takes it back as the handler returns */
  return error;
}

static size_t bytes_of(const struct array *array) {
  size_t bytes = datatype_find(array->dtype)->bytes;
  for (int axis = 0; axis < array->rank; axis++) bytes *= (size_t)array->dims[axis];
  return bytes;
}

ffi_error *call_there(const char *operation, const struct array in[], int in_count, const struct array out[],
                      int out_count, const int64_t attributes[], const void *lying[]) {
  struct array given[MAX_ARRAYS], there[MAX_ARRAYS] = {0};
  struct frame frame;
  const int count = in_count + out_count;
  for (int i = 0, k = 0; i < count; i++, k = 0) {
    there[i] = given[i] = i < in_count ? in[i] : out[i - in_count];
    size_t bytes = bytes_of(&given[i]);
    while (k < in_count && k < i && (i < in_count || given[k].data != given[i].data)) k++;
    there[i].data = bytes == 0 ? NULL : i >= in_count && k < in_count ? there[k].data : driver->allocate(bytes);
    if (bytes > 0) driver->write(there[i].data, given[i].data, bytes);
    if (lying != NULL) lying[i] = there[i].data;
  }
  frame_make_lists(&frame, operation, there, in_count, there + in_count, out_count, attributes);
  ffi_error *error = frame_call_in(space, &frame, operation);
  memset(&frame, 0xaa, sizeof frame); /* XLA takes it back as the handler returns */
  driver->synchronize(xla_stream);
  for (int i = count - 1; i >= 0; i--) {
    bool shared = false;
    if (there[i].data == NULL) continue;
    if (i >= in_count) driver->read(given[i].data, there[i].data, bytes_of(&given[i]));
    for (int k = 0; k < in_count && i >= in_count; k++) shared |= there[k].data == there[i].data;
    if (!shared) driver->release(there[i].data);
  }
  return error;
}

void was_left(const char *text) {
  struct failure *failure = failure_take();
  if (CHECK(failure != NULL) && !CHECK(strstr(failure->text, text) != NULL)) printf("%s\n", failure->text);
  free(failure);
}

const char *const driver_functions[] = {
#define TEXT(name, parameters)
#define FUNCTION(name, suffix, parameters) #name,
#define OPTIONAL                           FUNCTION
#include "devices/cuda.def"
#include "devices/hip.def"
#undef FUNCTION
#define FUNCTION(name, shown, symbol, result, parameters) shown,
#include "devices/sycl.def"
#undef FUNCTION
#undef OPTIONAL
#undef TEXT
    NULL};

bool driver_has_others;

static void fails_at(const char *function, const char *operation, ffi_error *error, bool reached) {
  CHECK(reached);
  FAILS(error, FFI_INTERNAL, function, "launch failure", space->call != NULL ? "code 719" : "exception", operation);
  while (driver->depth() > 0) CHECK(space->leave(NULL) == 0); /* leaving is what has failed */
}

void driver_fails(const char *what, const char *operation, ffi_error *(*call)(void *data), void *data) {
  for (const char *const *function = driver_functions; *function != NULL; function++)
    for (int nth = 1; nth < 12; nth++) {
      context("%s, %s failing at call %d, transport %s", what, *function, nth,
              runtime.aware ? "aware" : transport_names[runtime.transport]);
      nccl_finish();
      transport_finish();
      driver->reset();
      fake->reset();
      fake->hollow = runtime.unmarked = runtime.aware;
      driver->fail(*function, nth, FAKE_LAUNCH_FAILURE);
      ffi_error *error = call(data);
      bool reached = driver->calls(*function) >= nth;
      driver->reset();
      if (error == NULL) {
        if (reached && !driver_has_others) CHECK(strstr(*function, "Push") == NULL && failure_take() == NULL);
        break;
      }
      fails_at(*function, operation, error, reached);
      SUCCEEDS(call(data));
      finish();
    }
}

int main(int argc, char **argv) {
  const char *path = getenv("FAKE_DRIVER");
  void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_GLOBAL) : NULL;
  struct fake_driver *(*get)(void) = NULL;
  void *symbol = library != NULL ? dlsym(library, "fake_driver") : NULL;
  memcpy(&get, &symbol, sizeof get);
  if (get == NULL) return printf("cannot open the driver %s\n", path != NULL ? path : "FAKE_DRIVER"), 1;
  driver = get();
  space = dlsym(library, "cuInit") != NULL    ? &memory_cuda
          : dlsym(library, "hipInit") != NULL ? &memory_rocm
                                              : &memory_sycl;
  if (memory_open(space) != NULL) return printf("%s\n", memory_open(space)), 1;
  xla_stream = driver->stream();
  importer = true;
  return run_tests(argc, argv);
}
