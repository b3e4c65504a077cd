/* Memory spaces: where XLA's buffers lie, and the driver's functions for them.
 *
 * A body in mpi/ uses pointers that MPI accepts and knows nothing of devices: transport.c provides these
 * pointers by the functions of a memory space. A space is a row in spaces.def and a file that defines one structure.
 * The functions return 0 or the driver's error code; after an error `memory_failed` names the driver's function.
 *
 * A stream is XLA's or made here; a stream executes its work in the order in which it was enqueued. A context is what a
 * thread must enter before it uses the streams, events and memory of a device.
 *
 * Threads: any thread may call the functions of a space, inside a context where one is needed; they take no lock of
 * ours.
 */
#ifndef JAXMPI_MEMORY_H
#define JAXMPI_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/ffi.h"

/* Rows of `width` bytes. `on_host` and `on_device` are the bytes from the beginning of a row to the next one. */
struct rows {
  size_t width, count, on_host;
  ptrdiff_t on_device;
};
/* A driver copies rows at once that do not overlap and are no more than MAX_PITCH bytes apart. */
enum { MAX_PITCH = 0x7fffffff };
static inline bool rows_at_once(const struct rows *rows) {
  return rows->count == 1 || (rows->on_device >= (ptrdiff_t)rows->width && rows->on_device <= MAX_PITCH &&
                              rows->on_host >= rows->width && rows->on_host <= MAX_PITCH);
}

struct call;

struct memory {
  const char *platform;         /* XLA's name for it; JAX's: JAX_NAMES in jaxmpi_launch/ */
  bool host;                    /* true for the host, whose members after `run` are NULL */
  ffi_handler *const *handlers; /* of the operations, in the order of ops.def: execute/handlers.h */

  /* Execute a call whose buffers lie in this memory and are known: in chunks, and in whichever thread may call MPI. */
  ffi_error *(*run)(struct call *call);

  /* The possible names of the driver's library, ending with NULL, and the text of the error if none can be loaded.
   * `load` looks up the functions in the library: NULL, or the name of a missing one. A space whose `libraries` is NULL
   * looks for the driver itself, in `context`. */
  const char *const *libraries;
  const char *absent;
  const char *(*load)(void *library);
  int (*count)(int *devices); /* devices that this process may use */

  int (*context)(void *stream, void **context);      /* of a stream of XLA's */
  int (*device_context)(int device, void **context); /* of a device, by the driver's number */
  int (*enter)(void *context, void **previous);
  int (*leave)(void *previous);

  int (*pin)(void **host, size_t bytes); /* allocates pinned host memory */
  int (*unpin)(void *host);

  /* Enqueued on the stream. For copy_down and copy_up `host` is pinned, and rows_at_once holds. */
  int (*copy_down)(void *host, const void *device, struct rows rows, void *stream);
  int (*copy_up)(void *device, const void *host, struct rows rows, void *stream);
  int (*copy)(void *to, const void *from, size_t bytes, void *stream);
  int (*zero)(void *device, size_t bytes, void *stream);
  /* A host function, which must not call the driver. NULL: streams take none, and there are no flags, no
   * `device_context` and no `event_done`. */
  int (*call)(void *stream, void (*function)(void *), void *data);

  /* Flags: words of memory that host code and streams access, for values up to INT32_MAX. `has_flags`: the driver has
   * the functions; without them the other functions must not be called. `flags_serve`: whether the stream can use this
   * flag, which is 0. */
  bool (*has_flags)(void);
  int (*flags_serve)(void *stream, void *flag, bool *served);
  int (*flag_make)(void **flag);
  int (*flag_free)(void *flag);
  int (*flag_write)(void *stream, void *flag, uint32_t value); /* after the earlier work of the stream */
  int (*flag_wait)(void *stream, void *flag, uint32_t value);  /* later work waits until it has this value, or more */

  int (*stream_make)(void **stream);
  int (*stream_free)(void *stream);
  int (*stream_synchronize)(void *stream);       /* waits until all work on it is done */
  int (*stream_wait)(void *stream, void *event); /* later work of the stream waits for the event, if recorded */
  int (*event_make)(void **event);
  int (*event_free)(void *event);
  int (*event_record)(void *event, void *stream); /* marks the work enqueued so far */
  int (*event_done)(void *event, bool *done);     /* whether that work is done */
  int (*event_synchronize)(void *event);          /* waits until that work is done */

  void (*text)(int code, const char **name, const char **text); /* of an error code; NULL if unknown */
};

/* Initialize the members that each device has from static functions of the same names, and the members of devices
 * whose streams take work of the host. */
#define MEMORY_FUNCTIONS                                                                              \
  .count = count, .context = context, .enter = enter, .leave = leave, .pin = pin, .unpin = unpin,     \
  .copy_down = copy_down, .copy_up = copy_up, .copy = copy, .zero = zero, .stream_make = stream_make, \
  .stream_free = stream_free, .stream_synchronize = stream_synchronize, .stream_wait = stream_wait,   \
  .event_make = event_make, .event_free = event_free, .event_record = event_record,                   \
  .event_synchronize = event_synchronize, .text = text
#define MEMORY_CALLS                                                                                    \
  .device_context = device_context, .event_done = event_done, .call = call, .has_flags = has_flags,     \
  .flags_serve = flags_serve, .flag_make = flag_make, .flag_free = flag_free, .flag_write = flag_write, \
  .flag_wait = flag_wait

/* Enqueue copies of rows, whatever their distance: up to the device, or down to the host. */
int memory_copy_rows(const struct memory *memory, bool up, void *host, void *device, struct rows rows, void *stream);

/* The offset of the next buffer in staging memory that is in use up to `bytes`. */
static inline size_t memory_aligned(size_t bytes) {
  enum { ALIGNMENT = 256 };
  return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* The capacity to which staging memory grows, by doubling, until it holds `bytes`. `capacity`: now; 0: there is none.
 */
static inline size_t memory_doubled(size_t capacity, size_t bytes) {
  if (capacity == 0) capacity = 1 << 16;
  while (capacity < bytes) capacity *= 2;
  return capacity;
}

/* The driver's function that failed last in this thread, as recorded by memory_checked. */
extern _Thread_local const char *memory_failed;
static inline int memory_checked(const char *function, int code) {
  if (code != 0) memory_failed = function;
  return code;
}

#endif
