/* Memory spaces: where XLA's buffers lie, and what a driver can do with them.
 *
 * A body in mpi/ops.c asks for pointers that MPI may use and never sees a device: transport.c brings it such pointers,
 * by what a space can do. A space is a row in spaces.def and a file with one structure. Functions return 0 or the
 * driver's code, and then `memory_failed` names the function of the driver. They may be called by any thread, which
 * must have entered the context where one is needed; none takes a lock of ours.
 *
 * A stream is XLA's or one made here; work on one stream is done in the order in which it was given. A context is what
 * the calling thread must have entered to speak of a device's streams, events and memory.
 */
#ifndef JAXMPI_MEMORY_H
#define JAXMPI_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "xla/ffi.h"

enum { MAX_PITCH = 0x7fffffff };

struct memory {
  const char *platform;         /* XLA's name for it */
  bool host;                    /* MPI and this process reach it as it is: what follows `handlers` is NULL */
  ffi_handler *const *handlers; /* for buffers that lie there, in the order of ops.def; see xla/handlers.h */

  /* The driver's library by any of its names, ending with NULL, and what to say where there is none. `load` finds the
   * functions in it; NULL, or the name of one that it lacks. */
  const char *const *libraries;
  const char *absent;
  const char *(*load)(void *library);
  int (*count)(int *devices); /* that this process may use */

  int (*context)(void *stream, void **context); /* of XLA's stream */
  int (*enter)(void *context, void **previous);
  int (*leave)(void *previous);

  int (*pin)(void **host, size_t bytes); /* host memory that is copied from and to without a detour */
  int (*unpin)(void *host);

  /* Given to the stream, done later. `host` is pinned; `rows` rows of `width` bytes lie there one behind the other, and
   * `pitch` bytes apart on the device, MAX_PITCH at most. */
  int (*copy_down)(void *host, const void *device, size_t width, size_t rows, size_t pitch, void *stream);
  int (*copy_up)(void *device, const void *host, size_t width, size_t rows, size_t pitch, void *stream);
  int (*copy)(void *to, const void *from, size_t bytes, void *stream);
  int (*zero)(void *device, size_t bytes, void *stream);
  int (*call)(void *stream, void (*function)(void *), void *data); /* `function` may not call the driver */

  int (*stream_make)(void **stream);
  int (*stream_free)(void *stream);
  int (*stream_synchronize)(void *stream);       /* waits for all of it */
  int (*stream_wait)(void *stream, void *event); /* later work of the stream waits for the event, if it was recorded */
  int (*event_make)(void **event);
  int (*event_free)(void *event);
  int (*event_record)(void *event, void *stream); /* it stands for the work given to the stream so far */
  int (*event_synchronize)(void *event);          /* waits for it */

  void (*text)(int code, const char **name, const char **text); /* of an error; NULL where it has none */
};

/* For the end of a file: all of them, as it has named them. */
#define MEMORY_FUNCTIONS                                                                                            \
  .count = count, .context = context, .enter = enter, .leave = leave, .pin = pin, .unpin = unpin,                   \
  .copy_down = copy_down, .copy_up = copy_up, .copy = copy, .zero = zero, .call = call, .stream_make = stream_make, \
  .stream_free = stream_free, .stream_synchronize = stream_synchronize, .stream_wait = stream_wait,                 \
  .event_make = event_make, .event_free = event_free, .event_record = event_record,                                 \
  .event_synchronize = event_synchronize, .text = text

#define SPACE(name) extern const struct memory memory_##name;
#include "devices/spaces.def"
#undef SPACE

extern const struct memory *const memory_spaces[]; /* ends with NULL; the host is the first */

/* Whether the process has loaded the library of the driver of a space. */
bool memory_loaded(const struct memory *memory);

/* Loads the driver of a space at the first call. NULL, or why its arrays cannot be communicated. One call at a time. */
const char *memory_open(const struct memory *memory);

/* The driver's function that has failed last in this thread; notes it where the code is one of a failure. */
extern _Thread_local const char *memory_failed;
static inline int memory_checked(const char *function, int code) {
  if (code != 0) memory_failed = function;
  return code;
}

#endif
