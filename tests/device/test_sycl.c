/* Intel's devices alone, by the functions of the memory space, on the fake libsycl: how the library is found,
 * exceptions, and what is left behind. How calls of operations go is tested by test_device.c. Arguments: the fake
 * libsycl.so.9, and a libsycl.so.8 that has no functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/memory.h"
#include "devices/exceptions.h"
#include "devices/spaces.h"
#include "fake_driver.h"

static const struct memory *const space = &memory_sycl;
static struct fake_driver *driver;
static int failures;

#define CHECK(condition) check(condition, #condition, __LINE__)
static void check(bool condition, const char *text, int line) {
  if (condition) return;
  printf("%s:%d: %s\n", __FILE__, line, text);
  failures++;
}

static void *open_library(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == NULL) printf("%s\n", dlerror()), exit(1);
  return library;
}

/* The last function that has failed, and what the code says. */
static bool says(int code, const char *function, const char *words) {
  const char *name = "", *text = "";
  if (code != 0) space->text(code, &name, &text);
  bool said = code != 0 && strcmp(memory_failed, function) == 0 && strstr(text, words) != NULL;
  if (!said) printf("%s: %d, %s: %s\n", memory_failed, code, name, text);
  return said;
}

/* In a process of its own: the library is looked for once. */
static void looked_for(const char *one, const char *other, const char *expected) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    void *context = NULL;
    if (one != NULL) open_library(one);
    if (other != NULL) open_library(other);
    for (int i = 0; i < 2; i++) CHECK(says(space->context(&context, &context), "loading SYCL", expected));
    fflush(stdout);
    _exit(failures > 0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* What the library does not write must not be read. */
__attribute__((noinline)) static void dirty_the_stack(void) {
  volatile unsigned char room[1 << 14];
  for (size_t i = 0; i < sizeof room; i++) room[i] = 0xaa;
}

static void memory_and_exceptions(void) {
  enum { BYTES = 1000, COPIES = 40000, EXCEPTIONS = 20000 };
  void *stream = driver->stream(), *context, *before, *pinned, *queue, *event, *device = driver->allocate(BYTES);
  driver->slow = false;
  CHECK(space->context(stream, &context) == 0 && context != NULL && context != stream);
  CHECK(space->enter(context, &before) == 0 && before == NULL);
  CHECK(space->pin(&pinned, BYTES) == 0);
  for (int i = 0; i < COPIES; i++) {
    CHECK(space->copy_down(pinned, device, (struct rows){BYTES, 1, BYTES, BYTES}, stream) == 0);
    if (i % 100 == 0) CHECK(space->stream_synchronize(stream) == 0);
  }
  CHECK(space->stream_synchronize(stream) == 0 && driver->live_events == 0);
  for (int i = 0; i < EXCEPTIONS; i++) {
    driver->fail("sycl::queue::memset", 1, i % 2 == 0 ? FAKE_LAUNCH_FAILURE : FAKE_OUT_OF_MEMORY);
    const char *text = i % 2 == 0 ? "unspecified launch failure" : "St9bad_alloc"; /* an exception of another class */
    CHECK(says(space->zero(device, BYTES, stream), "sycl::queue::memset", text));
  }
  void *none = pinned;
  driver->fail("sycl::malloc_host", 1, FAKE_OUT_OF_MEMORY);
  CHECK(says(space->pin(&none, BYTES), "sycl::malloc_host", "out of memory") && none == NULL);
  /* each function on the way to a queue of our own */
  const char *const functions[] = {"sycl::queue::getPropList", "sycl::queue::get_context", "sycl::queue::get_device",
                                   "sycl::queue::queue"};
  for (int i = 0; i < 4; i++) {
    driver->fail(functions[i], 1, FAKE_LAUNCH_FAILURE);
    CHECK(says(space->stream_make(&queue), functions[i], "launch failure") && driver->live_events == 0);
  }
  dirty_the_stack();
  CHECK(space->stream_make(&queue) == 0 && driver->live_streams == 1);
  /* an event that was never recorded is waited for by nobody, and one that is recorded again leaves nothing */
  CHECK(space->event_make(&event) == 0 && space->event_synchronize(event) == 0 &&
        space->stream_wait(queue, event) == 0);
  for (int i = 0; i < 3; i++) CHECK(space->event_record(event, stream) == 0 && space->stream_wait(queue, event) == 0);
  CHECK(space->event_synchronize(event) == 0 && driver->live_events == 1);
  CHECK(space->event_free(event) == 0 && space->stream_free(queue) == 0);
  CHECK(driver->live_events == 0 && driver->live_streams == 0);
  /* XLA has destroyed the queue, of which we have a use: the memory can be freed */
  memset(stream, 0, 2 * sizeof(void *));
  CHECK(space->unpin(pinned) == 0 && driver->live_pinned == 0);
  CHECK(space->leave(before) == 0);
  driver->release(device);
  free(stream);
  CHECK(driver->violations == 0);
  if (driver->violations > 0) printf("%s\n", driver->violation);
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  CHECK(memory_open(space) == NULL && space->call == NULL);
  looked_for(NULL, NULL, "neither libsycl.so.8 nor libsycl.so.9");
  looked_for(argv[1], argv[2], "both libsycl.so.9 and libsycl.so.8");
  looked_for(argv[2], NULL, "libsycl.so.8 has no _ZN4sycl3_V15event4waitEv: install another version");
  void *symbol = dlsym(open_library(argv[1]), "fake_driver");
  struct fake_driver *(*get)(void) = NULL;
  memcpy(&get, &symbol, sizeof get);
  driver = get();
  memory_and_exceptions();
  printf("%d failures\n", failures);
  return failures > 0;
}
