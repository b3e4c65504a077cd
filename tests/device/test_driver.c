/* The fake driver itself: it must execute the work of a stream in order, and find each breach of its rules.
 * Argument: the library, of either interface. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fake_driver.h"

#define ADDRESS(pointer) ((address)(uintptr_t)(pointer))

static struct fake_driver *fake;
static void *library;
static bool hip;
static int failures;

#define CHECK(condition)   check(condition, #condition, __LINE__)
#define BREAKS(call, code) breaks(call, code, #call, __LINE__)

static void check(bool condition, const char *text, int line) {
  if (condition) return;
  printf("%s:%d: %s\n", __FILE__, line, text);
  failures++;
}

/* The call has returned this code and counted as a violation; both are forgotten. */
static void breaks(int code, int expected, const char *text, int line) {
  check(code == expected, text, line);
  check(fake->violations == 1 && fake->violation[0] != '\0', "one violation", line);
  fake->reset();
}

static void *function(const char *name) {
  void *found = dlsym(library, name);
  if (found == NULL) printf("there is no %s\n", name), exit(1);
  return found;
}

/* The functions that both have, and those of one. */
#define BOTH(name, cuda, hip_name, parameters, ...) \
  static int name parameters { return ((int(*) parameters)function(hip ? #hip_name : #cuda))(__VA_ARGS__); }
#define ONE(name, parameters, ...) \
  static int name parameters { return ((int(*) parameters)function(#name))(__VA_ARGS__); }

BOTH(initialize, cuInit, hipInit, (unsigned flags), flags)
BOTH(count, cuDeviceGetCount, hipGetDeviceCount, (int *n), n)
BOTH(pin, cuMemHostAlloc, hipHostMalloc, (void **host, size_t n, unsigned flags), host, n, flags)
BOTH(unpin, cuMemFreeHost, hipHostFree, (void *host), host)
BOTH(event_make, cuEventCreate, hipEventCreateWithFlags, (void **e, unsigned flags), e, flags)
BOTH(event_free, cuEventDestroy_v2, hipEventDestroy, (void *e), e)
BOTH(event_mark, cuEventRecord, hipEventRecord, (void *e, void *s), e, s)
BOTH(event_finish, cuEventSynchronize, hipEventSynchronize, (void *e), e)
BOTH(stream_make, cuStreamCreate, hipStreamCreateWithFlags, (void **s, unsigned flags), s, flags)
BOTH(stream_free, cuStreamDestroy_v2, hipStreamDestroy, (void *s), s)
BOTH(stream_finish, cuStreamSynchronize, hipStreamSynchronize, (void *s), s)
BOTH(stream_wait, cuStreamWaitEvent, hipStreamWaitEvent, (void *s, void *e, unsigned flags), s, e, flags)
BOTH(call, cuLaunchHostFunc, hipLaunchHostFunc, (void *s, void (*f)(void *), void *data), s, f, data)
ONE(cuStreamGetCtx, (void *s, void **context), s, context)
ONE(cuCtxPushCurrent_v2, (void *context), context)
ONE(cuCtxPopCurrent_v2, (void **context), context)
ONE(cuGetErrorName, (int code, const char **name), code, name)
ONE(cuMemcpyHtoDAsync_v2, (address to, const void *from, size_t n, void *s), to, from, n, s)
ONE(cuMemcpyDtoHAsync_v2, (void *to, address from, size_t n, void *s), to, from, n, s)
ONE(cuMemcpyDtoDAsync_v2, (address to, address from, size_t n, void *s), to, from, n, s)
ONE(cuMemsetD8Async, (address to, unsigned char value, size_t n, void *s), to, value, n, s)
ONE(hipMemcpyAsync, (void *to, const void *from, size_t n, int kind, void *s), to, from, n, kind, s)
ONE(cuMemcpy2DAsync_v2, (const void *copy, void *s), copy, s)
ONE(hipMemcpy2DAsync,
    (void *to, size_t to_pitch, const void *from, size_t pitch, size_t n, size_t rows, int kind, void *s), to, to_pitch,
    from, pitch, n, rows, kind, s)
ONE(hipMemsetAsync, (void *to, int value, size_t n, void *s), to, value, n, s)

static int up(void *to, const void *from, size_t n, void *s) {
  return hip ? hipMemcpyAsync(to, from, n, 1, s) : cuMemcpyHtoDAsync_v2(ADDRESS(to), from, n, s);
}
static int down(void *to, const void *from, size_t n, void *s) {
  return hip ? hipMemcpyAsync(to, from, n, 2, s) : cuMemcpyDtoHAsync_v2(to, ADDRESS(from), n, s);
}
static int across(void *to, const void *from, size_t n, void *s) {
  return hip ? hipMemcpyAsync(to, from, n, 3, s) : cuMemcpyDtoDAsync_v2(ADDRESS(to), ADDRESS(from), n, s);
}
static int fill(void *to, unsigned char value, size_t n, void *s) {
  return hip ? hipMemsetAsync(to, value, n, s) : cuMemsetD8Async(ADDRESS(to), value, n, s);
}
/* Rows of `n` bytes between the host, where they are that far apart, and the device. */
struct rows {
  size_t n, count, on_host, on_device;
};
static int rows_down(void *to, const void *from, struct rows r, void *s) {
  struct cuda_rows copy = {.from_kind = 2,
                           .from_device = ADDRESS(from),
                           .from_pitch = r.on_device,
                           .to_kind = 1,
                           .to_host = to,
                           .to_pitch = r.on_host,
                           .width = r.n,
                           .rows = r.count};
  return hip ? hipMemcpy2DAsync(to, r.on_host, from, r.on_device, r.n, r.count, 2, s) : cuMemcpy2DAsync_v2(&copy, s);
}
static int enter(void *s) {
  void *context = NULL;
  return hip ? 0 : cuStreamGetCtx(s, &context) + cuCtxPushCurrent_v2(context);
}
static int leave(void) { return hip ? 0 : cuCtxPopCurrent_v2(&(void *){NULL}); }

static int flag_make(void **flag) {
  return hip ? ((int (*)(void **, size_t, unsigned))function("hipExtMallocWithFlags"))(flag, 8, 2) : pin(flag, 4, 3);
}
static int flag_free(void *flag) { return hip ? ((int (*)(void *))function("hipFree"))(flag) : unpin(flag); }
static int flag_write(void *s, void *flag, uint32_t value) {
  return hip ? ((int (*)(void *, void *, uint32_t, unsigned))function("hipStreamWriteValue32"))(s, flag, value, 0)
             : ((int (*)(void *, address, uint32_t, unsigned))function("cuStreamWriteValue32_v2"))(s, ADDRESS(flag),
                                                                                                   value, 0);
}
static int flag_wait(void *s, void *flag, uint32_t value) {
  return hip ? ((int (*)(void *, void *, uint32_t, unsigned, uint32_t))function("hipStreamWaitValue32"))(s, flag, value,
                                                                                                         0, UINT32_MAX)
             : ((int (*)(void *, address, uint32_t, unsigned))function("cuStreamWaitValue32_v2"))(s, ADDRESS(flag),
                                                                                                  value, 0);
}

/* What each test may use, all of BYTES. */
enum { BYTES = 5000 };
static void *stream, *other, *event;
static unsigned char *pinned, *pinned2, *device, *device2, bytes[BYTES], seen[BYTES];

static bool all(const unsigned char *data, unsigned char value) {
  for (int i = 0; i < BYTES; i++)
    if (data[i] != value) return false;
  return true;
}

static void copies_are_done_in_order(void) {
  memcpy(pinned, bytes, BYTES);
  for (int i = 0; i < 20; i++) {
    CHECK(fill(device, 7, BYTES, stream) == 0);
    CHECK(up(device + 1, pinned + 1, BYTES - 1, stream) == 0);
    CHECK(across(device2, device, BYTES, stream) == 0 && down(pinned2, device2, BYTES, stream) == 0);
    CHECK(event_mark(event, stream) == 0 && event_finish(event) == 0);
    CHECK(pinned2[0] == 7 && memcmp(pinned2 + 1, bytes + 1, BYTES - 1) == 0);
  }
  fake->read(seen, device2 + 10, 100);
  CHECK(memcmp(seen, bytes + 10, 100) == 0 && fake->reach(bytes) == bytes);
  CHECK(memcmp(fake->reach(device + 20), bytes + 20, 100) == 0);
}

/* A result that is read too early is poison, a source that is overwritten too early arrives so. */
static void a_missing_wait_shows(void) {
  fake->block(stream, true);
  CHECK(down(pinned, device, BYTES, stream) == 0 && all(pinned, FAKE_POISON));
  memset(pinned2, 1, BYTES);
  CHECK(up(device2, pinned2, BYTES, stream) == 0 && !all(pinned2, FAKE_POISON));
  memset(pinned2, 2, BYTES);
  CHECK(down(pinned2, device, BYTES, stream) == 0 && all(pinned2, 2)); /* still a source */
  fake->block(stream, false);
  CHECK(fake->synchronize(stream) == 0);
  fake->read(seen, device2, BYTES);
  CHECK(all(seen, 2) && !all(pinned2, 2));
}

/* Two copies of rows whose gaps on the host are the other's rows: each byte is poison until its own copy is done, which
 * is as if the rows were copied one by one. */
static void rows_are_copied_as_one(void) {
  memcpy(fake->reach(device), bytes, BYTES);
  srand(1);
  for (int turn = 0; turn < 200; turn++) {
    size_t n = 1 + (size_t)rand() % 20, other_n = 1 + (size_t)rand() % 20, gap = (size_t)rand() % 5;
    struct rows first = {n, 2 + (size_t)rand() % 50, n + other_n + gap, n + (size_t)rand() % 60};
    struct rows second = {other_n, first.count, first.on_host, other_n};
    memset(pinned, 1, BYTES);
    memset(pinned2, 1, BYTES);
    fake->block(stream, true);
    CHECK(rows_down(pinned, device, first, stream) == 0);
    for (size_t i = 0; i < first.count; i++) memset(pinned2 + i * first.on_host, FAKE_POISON, n);
    CHECK(memcmp(pinned, pinned2, BYTES) == 0);
    CHECK(rows_down(pinned + n, device + 1, second, stream) == 0);
    for (size_t i = 0; i < first.count; i++) memset(pinned2 + n + i * first.on_host, FAKE_POISON, other_n);
    CHECK(memcmp(pinned, pinned2, BYTES) == 0);
    memset(pinned + n - 1, 2, 1); /* of what is under way */
    CHECK(down(pinned + n - 1, device, 1, stream) == 0 && pinned[n - 1] == 2);
    fake->block(stream, false);
    CHECK(stream_finish(stream) == 0);
    for (size_t i = 0; i < first.count; i++) {
      memcpy(pinned2 + i * first.on_host, bytes + i * first.on_device, n);
      memcpy(pinned2 + n + i * first.on_host, bytes + 1 + i * other_n, other_n);
    }
    pinned2[n - 1] = bytes[0];
    CHECK(memcmp(pinned, pinned2, BYTES) == 0);
  }
  BREAKS(rows_down(pinned, device, (struct rows){1, 3, 1, BYTES / 2}, stream), FAKE_INVALID_VALUE);
  BREAKS(rows_down(pinned, device, (struct rows){1, 3, BYTES / 2, 1}, stream), FAKE_INVALID_VALUE);
  BREAKS(rows_down(pinned, device, (struct rows){4, 3, 3, 4}, stream), FAKE_INVALID_VALUE);
}

static void events_order_streams(void) {
  CHECK(event_finish(event) == 0 && stream_wait(stream, event, 0) == 0); /* never recorded */
  for (int i = 0; i < 20; i++) {
    CHECK(fill(device, (unsigned char)i, BYTES, other) == 0 && event_mark(event, other) == 0);
    CHECK(stream_wait(stream, event, 0) == 0 && down(pinned, device, BYTES, stream) == 0);
    CHECK(stream_finish(stream) == 0 && all(pinned, (unsigned char)i));
  }
}

static pthread_t callback_thread;
static void note(void *data) {
  callback_thread = pthread_self();
  usleep(2000);
  memset(data, 9, BYTES);
}

static void host_functions_have_their_place(void) {
  CHECK(call(stream, note, pinned) == 0 && up(device, pinned, BYTES, stream) == 0);
  CHECK(stream_finish(stream) == 0);
  fake->read(seen, device, BYTES);
  CHECK(all(seen, 9) && !pthread_equal(callback_thread, pthread_self()));
  pthread_t first = callback_thread;
  CHECK(call(other, note, pinned) == 0 && stream_finish(other) == 0 && pthread_equal(callback_thread, first));
}

static void breach(void *code) { *(int *)code = event_finish(event); }

static void breaches_are_found(void) {
  int code = 0;
  void *gone, *spare;
  CHECK(call(stream, breach, &code) == 0 && stream_finish(stream) == 0);
  BREAKS(code, FAKE_NOT_PERMITTED);
  BREAKS(down(bytes, device, BYTES, stream), FAKE_INVALID_VALUE); /* not pinned */
  BREAKS(down(pinned + 1, device, BYTES, stream), FAKE_INVALID_VALUE);
  BREAKS(up(device + 1, pinned, BYTES, stream), FAKE_INVALID_VALUE);
  BREAKS(up(pinned, pinned2, BYTES, stream), FAKE_INVALID_VALUE);
  BREAKS(fill(device + BYTES, 0, 1, stream), FAKE_INVALID_VALUE);
  BREAKS(across(device + 1, device, 2, stream), FAKE_INVALID_VALUE);
  BREAKS(unpin(pinned + 1), FAKE_INVALID_VALUE);
  fake->block(stream, true);
  CHECK(pin(&gone, 8, 1) == 0 && down(gone, device, 8, stream) == 0);
  BREAKS(unpin(gone), FAKE_INVALID_VALUE); /* in use */
  fake->block(stream, false);
  CHECK(stream_finish(stream) == 0 && unpin(gone) == 0);
  BREAKS(unpin(gone), FAKE_INVALID_VALUE);
  fake->block(stream, true);
  CHECK((spare = fake->allocate(8)) != NULL && fill(spare, 0, 8, stream) == 0);
  fake->release(spare);
  BREAKS(0, 0);
  fake->block(stream, false);
  BREAKS(stream_finish(stream), FAKE_ILLEGAL_ADDRESS);
  CHECK(event_make(&gone, 2) == 0 && event_free(gone) == 0);
  BREAKS(event_free(gone), FAKE_INVALID_HANDLE);
  BREAKS(event_mark(gone, stream), FAKE_INVALID_HANDLE);
  BREAKS(stream_wait(event, event, 0), FAKE_INVALID_HANDLE);
  BREAKS(stream_finish(NULL), FAKE_INVALID_HANDLE);
  CHECK(stream_make(&gone, 1) == 0 && fake->live_streams == 2 && fill(device, 77, BYTES, gone) == 0);
  CHECK(event_mark(event, gone) == 0 && stream_free(gone) == 0 && event_finish(event) == 0); /* is still done */
  fake->read(seen, device, BYTES);
  CHECK(all(seen, 77));
  BREAKS(stream_free(gone), FAKE_INVALID_HANDLE);
  if (hip) return;
  CHECK(leave() == 0 && fake->depth() == 0);
  BREAKS(event_finish(event), FAKE_INVALID_CONTEXT);
  BREAKS(leave(), FAKE_INVALID_CONTEXT);
  CHECK(enter(stream) == 0 && fake->depth() == 1);
}

/* Two streams hand over to each other by values; what is wrong with a value is found. */
static void values_order_streams(void) {
  _Atomic uint32_t *one = NULL, *two = NULL;
  void *made = NULL;
  CHECK(flag_make(&made) == 0);
  one = made;
  CHECK(flag_make(&made) == 0);
  two = made;
  atomic_store(one, 0);
  atomic_store(two, 0);
  for (uint32_t i = 1; i < 20; i++) {
    CHECK(fill(device, (unsigned char)i, BYTES, other) == 0 && flag_write(other, (void *)one, i) == 0);
    CHECK(flag_wait(stream, (void *)one, i) == 0 && down(pinned, device, BYTES, stream) == 0);
    CHECK(flag_write(stream, (void *)two, i) == 0 && flag_wait(other, (void *)two, i) == 0);
  }
  CHECK(stream_finish(stream) == 0 && all(pinned, 19) && atomic_load(two) == 19);
  CHECK(flag_write(stream, (void *)one, 19) == 0 && stream_finish(stream) == 0);
  BREAKS(0, 0); /* is there */
  CHECK(flag_wait(stream, (void *)one, 18) == 0 && stream_finish(stream) == 0);
  BREAKS(0, 0); /* one that has been passed */
  fake->longest_wait = 1000;
  CHECK(flag_wait(stream, (void *)one, 20) == 0);
  BREAKS(stream_finish(stream), FAKE_TIMEOUT);
  fake->longest_wait = 20000000;
  BREAKS(flag_wait(stream, pinned + 4, 20), FAKE_INVALID_VALUE);
  CHECK(flag_wait(stream, (void *)one, 20) == 0);
  BREAKS(flag_free((void *)one), FAKE_INVALID_VALUE); /* in use */
  atomic_store(one, 20);
  CHECK(stream_finish(stream) == 0);
  CHECK(flag_wait(stream, (void *)one, 21) == 0 && fill(device, 1, BYTES, stream) == 0);
  fake->lose(FAKE_ILLEGAL_ADDRESS);
  CHECK(stream_finish(stream) == FAKE_ILLEGAL_ADDRESS && fill(device, 1, 1, stream) == FAKE_ILLEGAL_ADDRESS);
  fake->lose(0);
  fake->read(seen, device, BYTES);
  CHECK(stream_finish(stream) == 0 && all(seen, 19));
  if (hip) BREAKS(flag_wait(stream, (void *)one, UINT32_MAX), FAKE_INVALID_VALUE);
  fake->without_flags = true;
  CHECK(hip || flag_write(stream, (void *)one, 21) == FAKE_NOT_SUPPORTED);
  fake->without_flags = false;
  CHECK(flag_free((void *)one) == 0 && flag_free((void *)two) == 0);
}

static void failures_come_on_request(void) {
  const char *name = hip ? "hipMemcpyAsync" : "cuMemcpyDtoHAsync";
  fake->fail(name, 2, FAKE_LAUNCH_FAILURE);
  memset(pinned, 3, BYTES);
  CHECK(down(pinned2, device, 1, stream) == 0);
  CHECK(down(pinned, device, BYTES, stream) == FAKE_LAUNCH_FAILURE && all(pinned, 3));
  CHECK(down(pinned, device, BYTES, stream) == 0 && fake->calls(name) == 3 && fake->violations == 0);
  CHECK(stream_finish(stream) == 0);
  if (hip)
    name = ((const char *(*)(int))function("hipGetErrorName"))(FAKE_LAUNCH_FAILURE);
  else
    CHECK(cuGetErrorName(FAKE_LAUNCH_FAILURE, &name) == 0 && cuGetErrorName(12345, &(const char *){NULL}) != 0);
  CHECK(strcmp(name, hip ? "hipErrorLaunchFailure" : "CUDA_ERROR_LAUNCH_FAILED") == 0);
}

static void devices_are_counted(void) {
  static const struct {
    const char *machine, *visible;
    int count;
  } cases[] = {{NULL, NULL, 1}, {"3", NULL, 3}, {"3", "2,0", 2}, {"3", "1,3,0", 1}, {"2", "", 0}, {"0", NULL, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *list = hip ? "HIP_VISIBLE_DEVICES" : "CUDA_VISIBLE_DEVICES";
    int found = -1;
    cases[i].machine != NULL ? setenv("FAKE_DEVICES", cases[i].machine, 1) : unsetenv("FAKE_DEVICES");
    cases[i].visible != NULL ? setenv(list, cases[i].visible, 1) : unsetenv(list);
    CHECK(initialize(0) == (cases[i].count == 0 ? FAKE_NO_DEVICE : 0));
    CHECK(count(&found) == (hip && found == 0 ? FAKE_NO_DEVICE : 0) && found == cases[i].count);
  }
}

/* A child process that does it dies. */
static bool kills(const volatile unsigned char *address_read) {
  int status = 0;
  pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL); /* the sanitizers' own would exit */
    _exit(*address_read == 1);
  }
  return waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

static void the_host_cannot_touch_the_device(void) {
  unsigned char *gone = fake->allocate(BYTES);
  CHECK(kills(gone) && kills(device + BYTES - 1) && !kills(fake->reach(device)));
  fake->release(gone);
  CHECK(kills(gone) && fake->reach(gone) == gone);
}

int main(int argc, char **argv) {
  if (argc < 2 || (library = dlopen(argv[1], RTLD_NOW)) == NULL) return printf("no library: %s\n", dlerror()), 1;
  hip = dlsym(library, "hipInit") != NULL;
  fake = ((struct fake_driver * (*)(void)) function("fake_driver"))();
  for (int i = 0; i < BYTES; i++) bytes[i] = (unsigned char)(i * 7 + i / 256);
  stream = fake->stream();
  CHECK(stream != NULL && enter(stream) == 0 && stream_make(&other, 1) == 0 && event_make(&event, 2) == 0);
  CHECK(pin((void **)&pinned, BYTES, 1) == 0 && pin((void **)&pinned2, BYTES, 1) == 0);
  CHECK((device = fake->allocate(BYTES)) != NULL && (device2 = fake->allocate(BYTES)) != NULL);
  CHECK(fake->most_pinned_bytes == 2 * BYTES && fake->live_device == 2);
  void (*const tests[])(void) = {events_order_streams,
                                 copies_are_done_in_order,
                                 a_missing_wait_shows,
                                 rows_are_copied_as_one,
                                 host_functions_have_their_place,
                                 values_order_streams,
                                 breaches_are_found,
                                 failures_come_on_request,
                                 devices_are_counted,
                                 the_host_cannot_touch_the_device};
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    fake->reset();
    tests[i]();
    CHECK(fake->violations == 0);
  }
  CHECK(unpin(pinned) == 0 && unpin(pinned2) == 0 && event_free(event) == 0 && stream_free(other) == 0);
  CHECK(fake->live_pinned + fake->live_events + fake->live_streams == 0 && fake->pinned_bytes == 0);
  fake->release(device);
  fake->release(device2);
  CHECK(leave() == 0 && fake->live_device == 0 && fake->violations == 0);
  printf("%d failures\n", failures);
  return failures != 0;
}
