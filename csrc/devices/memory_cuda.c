/* NVIDIA's devices, through the driver's library, which every machine with such a device has. Building needs no SDK,
 * and running does not need CUDA's runtime library. */

#include <stdint.h>

#include "base/memory.h"
#include "base/symbols.h"
#include "core/runtime.h"
#include "devices/cuda_types.h"
#include "devices/spaces.h"
#include "devices/transport.h"

/* The driver's flags: streams that do not wait for the default stream, events without timing, memory pinned for all
 * contexts, and memory mapped into the device's address space. */
enum { STREAM_NON_BLOCKING = 1, EVENT_DISABLE_TIMING = 2, MEMHOSTALLOC_PORTABLE = 1, MEMHOSTALLOC_DEVICEMAP = 2 };
enum { WAIT_VALUE_GEQ = 0, WRITE_VALUE_DEFAULT = 0, NOT_READY = 600, NOT_SUPPORTED = 801 };

static struct cuda {
#define FUNCTION(name, suffix, parameters) CUresult(*name) parameters;
#define OPTIONAL                           FUNCTION
#include "devices/cuda.def"
#undef FUNCTION
#undef OPTIONAL
} cuda;

static const char *load(void *library) {
  static const struct symbol symbols[] = {
#define FUNCTION(name, suffix, parameters) {#name #suffix, offsetof(struct cuda, name), true},
#define OPTIONAL(name, suffix, parameters) {#name #suffix, offsetof(struct cuda, name), false},
#include "devices/cuda.def"
#undef FUNCTION
#undef OPTIONAL
      {NULL, 0, false}};
  return symbols_load(library, symbols, &cuda);
}

#define CALL(name, ...)  memory_checked(#name, cuda.name(__VA_ARGS__))
#define ADDRESS(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

static int count(int *devices) {
  int code = CALL(cuInit, 0);
  return code != 0 ? code : CALL(cuDeviceGetCount, devices);
}

static int context(void *stream, void **result) { return CALL(cuStreamGetCtx, stream, (CUcontext *)result); }

static int device_context(int number, void **result) {
  CUdevice device = 0;
  int code = CALL(cuInit, 0);
  if (code == 0) code = CALL(cuDeviceGet, &device, number);
  return code != 0 ? code : CALL(cuDevicePrimaryCtxRetain, (CUcontext *)result, device);
}

static int enter(void *entered, void **previous) {
  *previous = NULL; /* not needed: the driver keeps a stack of entered contexts */
  return CALL(cuCtxPushCurrent, entered);
}

static int leave(void *previous) {
  CUcontext popped;
  (void)previous;
  return CALL(cuCtxPopCurrent, &popped);
}

static int pin(void **host, size_t bytes) { return CALL(cuMemHostAlloc, host, bytes, MEMHOSTALLOC_PORTABLE); }

static int unpin(void *host) { return CALL(cuMemFreeHost, host); }

static int copy_down(void *host, const void *device, struct rows rows, void *stream) {
  if (rows.count == 1) return CALL(cuMemcpyDtoHAsync, host, ADDRESS(device), rows.width, stream);
  CUDA_MEMCPY2D copy = {.src_type = MEMORY_DEVICE,
                        .src_device = ADDRESS(device),
                        .src_pitch = (size_t)rows.on_device,
                        .dst_type = MEMORY_HOST,
                        .dst_host = host,
                        .dst_pitch = rows.on_host,
                        .width = rows.width,
                        .height = rows.count};
  return CALL(cuMemcpy2DAsync, &copy, stream);
}

static int copy_up(void *device, const void *host, struct rows rows, void *stream) {
  if (rows.count == 1) return CALL(cuMemcpyHtoDAsync, ADDRESS(device), host, rows.width, stream);
  CUDA_MEMCPY2D copy = {.src_type = MEMORY_HOST,
                        .src_host = host,
                        .src_pitch = rows.on_host,
                        .dst_type = MEMORY_DEVICE,
                        .dst_device = ADDRESS(device),
                        .dst_pitch = (size_t)rows.on_device,
                        .width = rows.width,
                        .height = rows.count};
  return CALL(cuMemcpy2DAsync, &copy, stream);
}

static int copy(void *to, const void *from, size_t bytes, void *stream) {
  return CALL(cuMemcpyDtoDAsync, ADDRESS(to), ADDRESS(from), bytes, stream);
}

static int zero(void *device, size_t bytes, void *stream) {
  return CALL(cuMemsetD8Async, ADDRESS(device), 0, bytes, stream);
}

static int call(void *stream, void (*function)(void *), void *data) {
  return CALL(cuLaunchHostFunc, stream, function, data);
}

static bool has_flags(void) { return cuda.cuStreamWaitValue32 != NULL && cuda.cuStreamWriteValue32 != NULL; }

/* No attribute of a device says whether streams wait for 32-bit values. So try: wait for the value that is there. */
static int flags_serve(void *stream, void *flag, bool *served) {
  int code = CALL(cuStreamWaitValue32, stream, ADDRESS(flag), 0, WAIT_VALUE_GEQ);
  *served = code == 0;
  return code == NOT_SUPPORTED ? 0 : code;
}

/* Memory of this kind has the same address on the host and for all devices. */
static int flag_make(void **flag) {
  return CALL(cuMemHostAlloc, flag, sizeof(uint32_t), MEMHOSTALLOC_PORTABLE | MEMHOSTALLOC_DEVICEMAP);
}

static int flag_free(void *flag) { return CALL(cuMemFreeHost, flag); }

static int flag_write(void *stream, void *flag, uint32_t value) {
  return CALL(cuStreamWriteValue32, stream, ADDRESS(flag), value, WRITE_VALUE_DEFAULT);
}

static int flag_wait(void *stream, void *flag, uint32_t value) {
  return CALL(cuStreamWaitValue32, stream, ADDRESS(flag), value, WAIT_VALUE_GEQ);
}

static int stream_make(void **stream) { return CALL(cuStreamCreate, (CUstream *)stream, STREAM_NON_BLOCKING); }

static int stream_free(void *stream) { return CALL(cuStreamDestroy, stream); }

static int stream_synchronize(void *stream) { return CALL(cuStreamSynchronize, stream); }

static int stream_wait(void *stream, void *event) { return CALL(cuStreamWaitEvent, stream, event, 0); }

static int event_make(void **event) { return CALL(cuEventCreate, (CUevent *)event, EVENT_DISABLE_TIMING); }

static int event_free(void *event) { return CALL(cuEventDestroy, event); }

static int event_record(void *event, void *stream) { return CALL(cuEventRecord, event, stream); }

static int event_done(void *event, bool *done) {
  int code = cuda.cuEventQuery(event);
  *done = code == 0;
  return code == NOT_READY ? 0 : memory_checked("cuEventQuery", code);
}

static int event_synchronize(void *event) { return CALL(cuEventSynchronize, event); }

static void text(int code, const char **name, const char **description) {
  cuda.cuGetErrorName(code, name);
  cuda.cuGetErrorString(code, description);
}

#define MEMORY memory_cuda
#include "execute/handlers.h"

const struct memory memory_cuda = {
    .platform = "CUDA",
    .libraries = (const char *const[]){"libcuda.so.1", NULL},
    .absent = "there is no libcuda.so.1: no NVIDIA driver is installed",
    .handlers = handlers,
    .load = load,
    .run = transport_run,
    MEMORY_FUNCTIONS,
    MEMORY_CALLS,
};
