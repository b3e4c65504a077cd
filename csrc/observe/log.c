#include "observe/log.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

void log_begin(struct call *call, const char *format, ...) {
  char text[160];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  call->log.number = atomic_fetch_add(&runtime.calls, 1) + 1;
  fprintf(stderr, "r%d | %s %s token %012" PRIx64 "\n", runtime.rank, call->function, text, call->log.number);
  call->log.start = seconds_now();
}

void log_end(const struct call *call, bool failed) {
  fprintf(stderr, "r%d | %s %s after %.2e s, token %012" PRIx64 "\n", runtime.rank, call->function,
          failed ? "failed" : "done", seconds_now() - call->log.start, call->log.number);
}
