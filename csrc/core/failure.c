#include "core/failure.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/job.h"

/* Keeps an error for the next operation, unless one is kept already. The result may only be compared with NULL. */
static ffi_error *defer(enum ffi_error_code code, const char *text) {
  static char deferred;
  struct failure *none = NULL, *failure = malloc(sizeof *failure + strlen(text) + 1);
  if (failure != NULL) {
    failure->code = code;
    memcpy(failure->text, text, strlen(text) + 1);
    if (!atomic_compare_exchange_strong(&runtime.deferred, &none, failure)) free(failure);
  }
  return (ffi_error *)&deferred;
}

ffi_error *call_fail(const struct call *call, enum ffi_error_code code, const char *format, ...) {
  char text[2048];
  int length = snprintf(text, sizeof text, "jaxmpi.%s", call->operation->name);
  if (call->comm != NULL)
    length +=
        snprintf(text + length, sizeof text - (size_t)length, " on rank %d of %d", call->comm->rank, call->comm->size);
  length += snprintf(text + length, sizeof text - (size_t)length, ": ");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + length, sizeof text - (size_t)length, format, arguments);
  va_end(arguments);
  atomic_fetch_add(&runtime.failures, 1); /* makes linked calls check their link: link.c */
  if (atomic_load(&runtime.ends_on_error)) {
    fprintf(stderr, "%s. The job ends, as JAXMPI_ON_ERROR=abort says\n", text);
    job_end();
  }
  return call->frame != NULL ? ffi_fail(call->frame, code, text) : defer(code, text);
}

ffi_error *call_first(const struct call *call, ffi_error *first, ffi_error *second) {
  if (first == NULL) return second;
  if (second != NULL && call->frame != NULL) ffi_drop(call->frame, second);
  return first;
}

ffi_error *call_fail_driver(const struct call *call, const struct memory *memory, int code) {
  const char *function = memory_failed, *name = NULL, *text = NULL;
  memory->text(code, &name, &text);
  return call_fail(call, FFI_INTERNAL, "%s failed: %s, code %d (%s)", function, name != NULL ? name : "an error", code,
                   text != NULL ? text : "the driver has no text for it");
}

/* Appends to a text of `length` characters. Returns the new length, which is less than `size`: the rest is cut off. */
__attribute__((format(printf, 4, 5))) static int append(char *text, size_t size, int length, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int added = vsnprintf(text + length, size - (size_t)length, format, arguments);
  va_end(arguments);
  int room = (int)size - 1 - length;
  return length + (added < room ? added : room);
}

ffi_error *call_fail_mpi(const struct call *call, int code) {
  char reason[1024] = "", given[256] = "";
  int length = 0;
  runtime.abi->error_text(code, reason);
  for (int i = 0; i < call->operation->attribute_count; i++)
    if (call->operation->attributes[i].kind == RANK || call->operation->attributes[i].kind == TAG)
      length = append(given, sizeof given, length, "; %s %" PRId64, call->operation->attributes[i].name,
                      call->attributes[i]);
  for (int i = 0; i < call->operation->buffer_count; i++)
    for (int k = call->first[i]; k < call->first[i + 1] && call->buffer_count > 0; k++)
      if (call->buffers[k].type != NULL)
        length = append(given, sizeof given, length, "; %s %" PRId64 " of %s", call->operation->buffers[i].name,
                        call->buffers[k].count, call->buffers[k].type->name);
  if (call->sending) /* told at once: if all ranks fail alike, nobody receives it */
    fprintf(stderr, "jaxmpi.%s on rank %d of %d: %s failed: %s. This rank waits until its own message is received\n",
            call->operation->name, call->comm->rank, call->comm->size, call->function, reason);
  return call_fail(call, FFI_INTERNAL, "%s failed: %s%s", call->function, reason, given);
}

ffi_error *call_fail_unknown(const struct call *call, const char *attribute) {
  return call_fail(call, FFI_FAILED_PRECONDITION,
                   "its %s is not known here: this program was compiled in another process, or for another "
                   "communicator; compile it again here. Nothing was sent",
                   attribute);
}
