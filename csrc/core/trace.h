/* The debug log: a line on stderr at the start and at the end of an operation, each with one write.
 *
 * Threads: the thread that calls MPI for the call, without the GIL. No lock is needed (stdio has its own); runtime.lock
 * may be held. */
#ifndef JAXMPI_TRACE_H
#define JAXMPI_TRACE_H

#include "core/core.h"

/* `format` gives peers, tags and sizes; the word "token" and the call's number follow it. Numbers the call. */
__attribute__((format(printf, 2, 3))) void trace_begin(struct call *call, const char *format, ...);
void trace_end(const struct call *call, bool failed);

#endif
