/* Memory spaces: where XLA's buffers lie, and how MPI gets at them.
 *
 * A body in ops.c asks for a pointer that MPI may use and never sees a device. `begin` turns call->in and call->out
 * from pointers of that space into such pointers: after it all earlier work on the input is visible to MPI. `end`
 * makes what MPI has written visible to later work of XLA and gives back what `begin` took; it is called for each
 * call whose `begin` succeeded, with the body's error (NULL: success), and returns the error that XLA shall see.
 *
 * A space is one file with one structure. NULL functions mean that there is nothing to do.
 */
#ifndef JAXMPI_MEMORY_H
#define JAXMPI_MEMORY_H

#include "core.h"

struct memory {
  const char *platform; /* XLA's name for it */
  ffi_error *(*begin)(struct call *call);
  ffi_error *(*end)(struct call *call, ffi_error *error);
};

extern const struct memory memory_host; /* pageable host memory, MPI reaches it as it is */

#endif
