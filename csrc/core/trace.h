/* The debug log: one line on stderr as an operation starts, one as it ends. No GIL, no lock but that
 * of stdio, one write per line. */
#ifndef JAXMPI_TRACE_H
#define JAXMPI_TRACE_H

#include "core/core.h"

/* `format` describes peers, tags and sizes and ends before the word "token". */
__attribute__((format(printf, 2, 3))) void trace_begin(struct call *call, const char *format, ...);
void trace_end(const struct call *call, bool failed);

#endif
