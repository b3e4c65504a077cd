#include "simulated.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "core/failure.h"
#include "devices/transport.h"

struct fake_driver *driver;
const struct memory *space;

void finish(void) {
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

int run_device_tests(int argc, char **argv, const struct test *tests, size_t count) {
  const char *path = getenv("FAKE_DRIVER");
  void *library = path != NULL ? dlopen(path, RTLD_NOW | RTLD_GLOBAL) : NULL;
  struct fake_driver *(*get)(void) = NULL;
  void *symbol = library != NULL ? dlsym(library, "fake_driver") : NULL;
  memcpy(&get, &symbol, sizeof get);
  if (get == NULL) return printf("cannot open the driver %s\n", path != NULL ? path : "FAKE_DRIVER"), 1;
  driver = get();
  space = dlsym(library, "cuInit") != NULL ? &memory_cuda : &memory_rocm;
  if (memory_open(space) != NULL) return printf("%s\n", memory_open(space)), 1;
  xla_stream = driver->stream();
  importer = true;
  return run_tests(argc, argv, tests, count);
}
