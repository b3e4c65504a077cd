/* AMD's devices, through HIP's library, which is part of every ROCm installation. Building needs no SDK. */

#include <stdint.h>

#include "base/memory.h"
#include "base/symbols.h"
#include "devices/spaces.h"
#include "devices/transport.h"

typedef int hipError_t;
typedef int hipDevice_t;
typedef int hipMemcpyKind;
typedef int hipDeviceAttribute_t;
typedef struct ihipEvent_t *hipEvent_t;
typedef struct ihipStream_t *hipStream_t;
typedef void (*hipHostFn_t)(void *);

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };
enum { STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2, HOST_MALLOC_PORTABLE = 1 };
enum { ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE = 10013, MALLOC_SIGNAL_MEMORY = 2, SIGNAL_BYTES = 8 };
enum { WAIT_VALUE_GTE = 0, WRITE_VALUE_DEFAULT = 0, ALL_BITS = -1, NOT_READY = 600 };

static struct hip {
#define FUNCTION(name, suffix, parameters) hipError_t(*name) parameters;
#define OPTIONAL                           FUNCTION
#define TEXT(name, parameters)             const char *(*name)parameters;
#include "devices/hip.def"
#undef FUNCTION
#undef OPTIONAL
#undef TEXT
} hip;

static const char *load(void *library) {
  static const struct symbol symbols[] = {
#define FUNCTION(name, suffix, parameters) {#name #suffix, offsetof(struct hip, name), true},
#define OPTIONAL(name, suffix, parameters) {#name #suffix, offsetof(struct hip, name), false},
#define TEXT(name, parameters)             {#name, offsetof(struct hip, name), true},
#include "devices/hip.def"
#undef FUNCTION
#undef OPTIONAL
#undef TEXT
      {NULL, 0, false}};
  return symbols_load(library, symbols, &hip);
}

#define CALL(name, ...) memory_checked(#name, hip.name(__VA_ARGS__))

static int count(int *devices) {
  int code = CALL(hipInit, 0);
  return code != 0 ? code : CALL(hipGetDeviceCount, devices);
}

/* HIP has deprecated contexts. So the context is the number of a device, which a thread enters. */
static int context(void *stream, void **result) {
  int device = 0, code = CALL(hipStreamGetDevice, stream, &device);
  *result = (void *)(intptr_t)device;
  return code;
}

static int device_context(int device, void **result) {
  *result = (void *)(intptr_t)device;
  return CALL(hipInit, 0);
}

static int enter(void *entered, void **previous) {
  int device = 0, code = CALL(hipGetDevice, &device);
  *previous = (void *)(intptr_t)device;
  return code != 0 || entered == *previous ? code : CALL(hipSetDevice, (int)(intptr_t)entered);
}

static int leave(void *previous) { return CALL(hipSetDevice, (int)(intptr_t)previous); }

static int pin(void **host, size_t bytes) { return CALL(hipHostMalloc, host, bytes, HOST_MALLOC_PORTABLE); }

static int unpin(void *host) { return CALL(hipHostFree, host); }

static int copy_down(void *host, const void *device, struct rows rows, void *stream) {
  if (rows.count == 1) return CALL(hipMemcpyAsync, host, device, rows.width, DEVICE_TO_HOST, stream);
  return CALL(hipMemcpy2DAsync, host, rows.on_host, device, (size_t)rows.on_device, rows.width, rows.count,
              DEVICE_TO_HOST, stream);
}

static int copy_up(void *device, const void *host, struct rows rows, void *stream) {
  if (rows.count == 1) return CALL(hipMemcpyAsync, device, host, rows.width, HOST_TO_DEVICE, stream);
  return CALL(hipMemcpy2DAsync, device, (size_t)rows.on_device, host, rows.on_host, rows.width, rows.count,
              HOST_TO_DEVICE, stream);
}

static int copy(void *to, const void *from, size_t bytes, void *stream) {
  return CALL(hipMemcpyAsync, to, from, bytes, DEVICE_TO_DEVICE, stream);
}

static int zero(void *device, size_t bytes, void *stream) { return CALL(hipMemsetAsync, device, 0, bytes, stream); }

static int call(void *stream, void (*function)(void *), void *data) {
  return CALL(hipLaunchHostFunc, stream, function, data);
}

static bool has_flags(void) {
  return hip.hipDeviceGetAttribute != NULL && hip.hipExtMallocWithFlags != NULL && hip.hipFree != NULL &&
         hip.hipStreamWaitValue32 != NULL && hip.hipStreamWriteValue32 != NULL;
}

static int flags_serve(void *stream, void *flag, bool *served) {
  (void)stream, (void)flag;
  int device = 0, can = 0, code = CALL(hipGetDevice, &device);
  if (code == 0) code = CALL(hipDeviceGetAttribute, &can, ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE, device);
  *served = code == 0 && can != 0;
  return code;
}

/* A stream can only wait for signal memory, of which the low half holds the value. */
static int flag_make(void **flag) { return CALL(hipExtMallocWithFlags, flag, SIGNAL_BYTES, MALLOC_SIGNAL_MEMORY); }

static int flag_free(void *flag) { return CALL(hipFree, flag); }

static int flag_write(void *stream, void *flag, uint32_t value) {
  return CALL(hipStreamWriteValue32, stream, flag, value, WRITE_VALUE_DEFAULT);
}

static int flag_wait(void *stream, void *flag, uint32_t value) {
  return CALL(hipStreamWaitValue32, stream, flag, value, WAIT_VALUE_GTE, (uint32_t)ALL_BITS);
}

static int stream_make(void **stream) {
  return CALL(hipStreamCreateWithFlags, (hipStream_t *)stream, STREAM_NON_BLOCKING);
}

static int stream_free(void *stream) { return CALL(hipStreamDestroy, stream); }

static int stream_synchronize(void *stream) { return CALL(hipStreamSynchronize, stream); }

static int stream_wait(void *stream, void *event) { return CALL(hipStreamWaitEvent, stream, event, 0); }

static int event_make(void **event) { return CALL(hipEventCreateWithFlags, (hipEvent_t *)event, EVENT_DISABLE_TIMING); }

static int event_free(void *event) { return CALL(hipEventDestroy, event); }

static int event_record(void *event, void *stream) { return CALL(hipEventRecord, event, stream); }

static int event_done(void *event, bool *done) {
  int code = hip.hipEventQuery(event);
  *done = code == 0;
  return code == NOT_READY ? 0 : memory_checked("hipEventQuery", code);
}

static int event_synchronize(void *event) { return CALL(hipEventSynchronize, event); }

static void text(int code, const char **name, const char **description) {
  *name = hip.hipGetErrorName(code);
  *description = hip.hipGetErrorString(code);
}

/* The loader seldom looks in ROCm's folder (JAX's plugin finds the folder by itself). So the last name below has it. */
#define MEMORY memory_rocm
#include "execute/handlers.h"

const struct memory memory_rocm = {
    .platform = "ROCM",
    .libraries = (const char *const[]){"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so",
                                       "/opt/rocm/lib/libamdhip64.so", NULL},
    .absent = "there is no libamdhip64.so: ROCm is not installed, or not where the loader looks",
    .handlers = handlers,
    .load = load,
    .run = transport_run,
    MEMORY_FUNCTIONS,
    MEMORY_CALLS,
};
