/* A fake device and driver, to test copies to and from devices without hardware.
 *
 * fake_driver.c is compiled into three shared libraries: as CUDA's driver, with FAKE_HIP as HIP's runtime, and with
 * FAKE_SYCL as SYCL's, where an error is an exception. The core opens each like the real one. A test sees it through
 * the structure below, which is the same for all.
 *
 * Device memory is an address range that host code cannot access (SIGSEGV, also after its release); the driver accesses
 * the content at another address. A stream is a thread that executes its operations one by one, each after a short
 * random delay, so that a missing wait shows as wrong data:
 *   device to host   the destination is filled with FAKE_POISON as soon as the operations given before allow it
 *   host to device   the source is read late, so that what has overwritten it in the meantime arrives
 *   host functions   run on one thread for all streams
 *   events           refer to their latest record; one that was never recorded is not waited for
 *   values           are written late, and awaited by a look at the memory now and then
 *
 * Breaches of the rules of CUDA and HIP are counted as violations, and the call returns an error:
 *   any call from a host function; for CUDA, a call without a current context where it needs one
 *   a handle that is unknown or was destroyed; a flag that does not exist; work for a stream of another device
 *   a copy beyond one live device allocation, or to or from host memory outside one live pinned allocation; two ranges
 *   that overlap; checked when the copy is enqueued and when it is executed
 *   memory freed while an operation that is not done uses it: pinned memory then stays, device memory is freed
 *   a value that is written where it is already; one that does not come in `longest_wait`, after which the stream goes
 *   on; a larger one than is awaited; for HIP, memory not made for it, and values that are negative as signed ones
 * A stream may be destroyed before its work is done; the work continues.
 *
 * Environment, read at each use:
 *   FAKE_DEVICES                                 number of devices in the machine, 1 if unset
 *   CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES  a list, which ends at the first entry that is no device
 *   FAKE_DRIVER_FAST                             read when the library is loaded: `slow` is off
 */
#ifndef JAXMPI_FAKE_DRIVER_H
#define JAXMPI_FAKE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FAKE_POISON = 0xa5 };

/* Codes with a name and a text, the same numbers in CUDA and HIP. */
enum {
  FAKE_INVALID_VALUE = 1,
  FAKE_OUT_OF_MEMORY = 2,
  FAKE_NOT_INITIALIZED = 3,
  FAKE_NO_DEVICE = 100,
  FAKE_INVALID_DEVICE = 101,
  FAKE_INVALID_CONTEXT = 201,
  FAKE_INVALID_HANDLE = 400,
  FAKE_NOT_READY = 600,
  FAKE_ILLEGAL_ADDRESS = 700,
  FAKE_TIMEOUT = 702,
  FAKE_LAUNCH_FAILURE = 719,
  FAKE_NOT_PERMITTED = 800,
  FAKE_NOT_SUPPORTED = 801,
  FAKE_UNKNOWN = 999
};

/* FAKE_NOT_READY: without a text, because no user sees it.
 * Functions have the names of the documentation, "cuMemcpyDtoHAsync"; a suffix "_v2" is ignored. */
struct fake_driver {
  /* Made and not freed; never reset. Streams: only those that the driver's user has made. */
  int live_device, live_pinned, live_events, live_streams;
  int64_t pinned_bytes;

  /* Since the last reset. */
  int64_t most_pinned_bytes;
  int violations;
  char violation[512]; /* the first */

  bool slow;            /* the random delays */
  int device;           /* of the streams that `stream` makes */
  int64_t longest_wait; /* for a value, in microseconds */
  bool without_flags;   /* the device has no values to be written and awaited */

  /* Zeroes the counters of calls and violations, removes pending failures and errors of streams. */
  void (*reset)(void);
  /* The nth call of this function from now on (1: the next) returns `code` and does nothing. Up to 16 may be pending.
   */
  void (*fail)(const char *function, int nth, int code);
  /* Calls since the last reset, failed ones too. */
  int (*calls)(const char *function);
  /* Contexts on the calling thread's stack: 0 for HIP. */
  int (*depth)(void);

  /* Done by XLA in reality. Device memory is aligned to 256 bytes; NULL if there is none left. */
  void *(*allocate)(size_t bytes);
  void (*release)(void *device);
  void *(*stream)(void);            /* not counted in live_streams */
  int (*synchronize)(void *stream); /* waits for all of it; 0, or the error of an operation */

  /* Enqueues a function that a kernel would be: it runs on the stream's own thread, may read and write device memory
   * through `reach`, and holds up no other stream. 0, or the error. `known`: whether a range is inside one live
   * allocation, of device memory or pinned, which a kernel could use. */
  int (*launch)(void *stream, void (*kernel)(void *), void *data);
  bool (*known)(const void *pointer, size_t bytes);

  /* Immediately, without regard to streams. */
  void (*write)(void *device, const void *host, size_t bytes);
  void (*read)(void *host, const void *device, size_t bytes);
  /* The accessible address of device memory; `pointer` itself if it is not device memory. */
  void *(*reach)(const void *pointer);
  /* Holds back operations of a stream that have not begun, until it is switched off. */
  void (*block)(void *stream, bool on);
  /* The device fails: what was given ends undone, and what is given or waited for from now on returns this code. With
   * 0 it works again. */
  void (*lose)(int code);
};

/* Of cuMemcpy2DAsync. */
typedef unsigned long long address;
struct cuda_rows {
  size_t from_x, from_y;
  int from_kind;
  const void *from_host;
  address from_device;
  void *from_array;
  size_t from_pitch;
  size_t to_x, to_y;
  int to_kind;
  void *to_host;
  address to_device;
  void *to_array;
  size_t to_pitch;
  size_t width, rows;
};

struct fake_driver *fake_driver(void);

#endif
