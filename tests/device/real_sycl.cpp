// The interface of fake_driver.h on the SYCL runtime and the CPU as the device: device memory is USM device memory, and a
// stream is a queue in order, as XLA makes it. What XLA would have computed comes late: a host task writes it to the
// device after a random delay, so that a missing wait shows as wrong data. Nothing is counted, and nothing fails on
// request.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <sycl/sycl.hpp>
#include <unistd.h>

extern "C" {
#include "fake_driver.h"
}

namespace {

struct fake_driver driver;
std::atomic<int> live;
std::atomic<sycl::queue *> first; // of the process; other threads may have queues of their own
thread_local sycl::queue *own;

const sycl::device &the_device() {
  static const sycl::device device{sycl::cpu_selector_v};
  return device;
}

const sycl::context &the_context() {
  static const sycl::context context{the_device()};
  return context;
}

void *make_stream() {
  const sycl::property_list like_xla{sycl::property::queue::in_order(), sycl::property::queue::enable_profiling()};
  auto *queue = new sycl::queue(the_context(), the_device(), like_xla);
  sycl::queue *none = nullptr;
  if (!first.compare_exchange_strong(none, queue)) own = queue;
  return queue;
}

int synchronize(void *stream) {
  try {
    static_cast<sycl::queue *>(stream)->wait_and_throw();
    return 0;
  } catch (const sycl::exception &) {
    return FAKE_LAUNCH_FAILURE;
  }
}

void *allocate(size_t bytes) {
  driver.live_device = ++live;
  return sycl::malloc_device(bytes, the_device(), the_context());
}

void release(void *device) {
  if (device == nullptr) return;
  driver.live_device = --live;
  sycl::free(device, the_context());
}

void write(void *device, const void *host, size_t bytes) {
  sycl::queue *queue = own != nullptr ? own : first.load();
  if (queue == nullptr) {
    std::memcpy(device, host, bytes);
    return;
  }
  void *copy = std::malloc(bytes);
  std::memcpy(copy, host, bytes);
  std::memset(device, FAKE_POISON, bytes);
  queue->submit([=](sycl::handler &handler) {
    handler.host_task([=] {
      usleep(static_cast<useconds_t>(std::rand() % 1000));
      std::memcpy(device, copy, bytes);
      std::free(copy);
    });
  });
}

void read(void *host, const void *device, size_t bytes) { std::memcpy(host, device, bytes); }

void *reach(const void *pointer) { return const_cast<void *>(pointer); }

} // namespace

extern "C" __attribute__((visibility("default"))) struct fake_driver *fake_driver(void) {
  driver.reset = [] {};
  driver.fail = [](const char *, int, int) {};
  driver.calls = [](const char *) { return 0; };
  driver.depth = [] { return 0; };
  driver.block = [](void *, bool) {};
  driver.allocate = allocate, driver.release = release;
  driver.stream = make_stream, driver.synchronize = synchronize;
  driver.write = write, driver.read = read, driver.reach = reach;
  return &driver;
}
