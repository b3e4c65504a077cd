/* The debug log: a line on stderr at the start and at the end of an operation, each with one write.
 *
 * Threads: the thread that calls MPI for the call, without the GIL. It may hold runtime.lock. No lock is taken: stdio
 * has one. */
#ifndef JAXMPI_LOG_H
#define JAXMPI_LOG_H

#include "core/call.h"
#include "core/runtime.h"

/* Number the call and write a line. `format` gives peers, tags and sizes; the word "token" and the number follow. */
__attribute__((format(printf, 2, 3))) void log_begin(struct call *call, const char *format, ...);
void log_end(const struct call *call, bool failed);

#endif
