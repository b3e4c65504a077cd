/* Waiting for requests until a deadline: see execute/deadline.h.
 *
 * Threads: those that call bodies; takes the locks of the requests. */
#ifndef JAXMPI_DEADLINES_H
#define JAXMPI_DEADLINES_H

#include "mpi/bodies.h"

#define wait_in_time ABI_LOCAL(wait_in_time)

/* Waits for all of these numbers' requests until a deadline. NULL: they are done, or there is another reason to go on,
 * and they can be waited for without one. */
ffi_error *wait_in_time(struct call *call, const struct buffer *ids, int count);

#endif
