#include "core/failure.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "core/abi.h"

/* Keep an error for the next operation, unless an error is kept already. Compare the result with NULL only. */
static ffi_error *defer_error(enum ffi_error_code code, const char *text) {
  static char deferred;
  struct failure *none = NULL, *failure = malloc(sizeof *failure + strlen(text) + 1);
  if (failure != NULL) {
    failure->code = code;
    memcpy(failure->text, text, strlen(text) + 1);
    if (!atomic_compare_exchange_strong(&runtime.deferred, &none, failure)) free(failure);
  }
  return (ffi_error *)&deferred;
}

/* The text of an error, preceded by operation and rank. */
__attribute__((format(printf, 3, 0))) static void describe_error(const struct call *call, char array[TEXT_BYTES],
                                                                 const char *format, va_list arguments) {
  struct text text = text_in(array, TEXT_BYTES);
  const char *name = call_name(call);
  text_add(&text, "jaxmpi%s%s", strchr(name, ' ') == NULL ? "." : ", ", name);
  if (call->comm != NULL) text_add(&text, " on rank %d of %d", call->comm->rank, call->comm->size);
  text_add(&text, ": ");
  text_add_arguments(&text, format, arguments);
}

static ffi_error *fail_with(const struct call *call, enum ffi_error_code code, const char *text) {
  atomic_fetch_add(&runtime.failures, 1); /* makes calls in order check their link: python/runtime_token.c */
  if (atomic_load(&runtime.ends_on_error)) {
    fprintf(stderr, "%s. The job ends, as JAXMPI_ON_ERROR=abort says\n", text);
    runtime.abort(text);
  }
  return call->frame != NULL ? ffi_fail(call->frame, code, text) : defer_error(code, text);
}

ffi_error *call_fail(const struct call *call, enum ffi_error_code code, const char *format, ...) {
  char text[TEXT_BYTES];
  va_list arguments;
  va_start(arguments, format);
  describe_error(call, text, format, arguments);
  va_end(arguments);
  return fail_with(call, code, text);
}

/* Errors of pytrees whose last array is still to come. */
static struct kept {
  struct kept *next;
  int row;
  int64_t attributes[MAX_ATTRIBUTES]; /* see attributes_of_tree */
  char text[];
} *errors_kept;
static pthread_mutex_t lock_of_kept = PTHREAD_MUTEX_INITIALIZER;
atomic_int failures_kept;

/* The attributes that calls of one pytree have in common; 0 in the place of others. Return the place of the leaf. */
static enum leaf attributes_of_tree(const struct call *call, int64_t attributes[MAX_ATTRIBUTES]) {
  int64_t place = LEAF_ALONE;
  memset(attributes, 0, MAX_ATTRIBUTES * sizeof *attributes);
  for (int i = 0; i < call->operation->attribute_count; i++) {
    enum attribute kind = call->operation->attributes[i].kind;
    if (kind == KIND_LEAF) place = call->attributes[i];
    if (kind != KIND_LEAF && kind != KIND_NUMBER) attributes[i] = call->attributes[i];
  }
  return (enum leaf)place;
}

/* The place where the error of a pytree is kept; NULL at that place if there is no error. Under lock_of_kept. */
static struct kept **find_kept(int row, const int64_t attributes[MAX_ATTRIBUTES]) {
  struct kept **at = &errors_kept;
  while (*at != NULL &&
         ((*at)->row != row || memcmp((*at)->attributes, attributes, MAX_ATTRIBUTES * sizeof *attributes) != 0))
    at = &(*at)->next;
  return at;
}

/* False: no memory. */
static bool keep_error(int row, const int64_t attributes[MAX_ATTRIBUTES], const char *text) {
  struct kept *new = malloc(sizeof *new + strlen(text) + 1);
  if (new == NULL) return false;
  *new = (struct kept){.row = row};
  memcpy(new->attributes, attributes, sizeof new->attributes);
  memcpy(new->text, text, strlen(text) + 1);
  pthread_mutex_lock(&lock_of_kept);
  struct kept **at = find_kept(row, attributes);
  if (*at == NULL) {
    *at = new;
    new = NULL;
    atomic_fetch_add(&failures_kept, 1);
  }
  pthread_mutex_unlock(&lock_of_kept);
  free(new); /* only the first error of a pytree is reported */
  return true;
}

/* The kept error of a pytree, which the caller then frees; NULL if there is none. */
static struct kept *take_kept(int row, const int64_t attributes[MAX_ATTRIBUTES]) {
  pthread_mutex_lock(&lock_of_kept);
  struct kept **at = find_kept(row, attributes), *kept = *at;
  if (kept != NULL) {
    *at = kept->next;
    atomic_fetch_sub(&failures_kept, 1);
  }
  pthread_mutex_unlock(&lock_of_kept);
  return kept;
}

/* The kept error of a pytree as the error of this call; NULL if none is kept. */
static ffi_error *fail_kept(const struct call *call, const int64_t attributes[MAX_ATTRIBUTES]) {
  struct kept *first = take_kept(call->operation->row, attributes);
  ffi_error *error = first != NULL ? fail_with(call, FFI_INVALID_ARGUMENT, first->text) : NULL;
  free(first);
  return error;
}

const char *advice_on_vmap(int64_t mine, int64_t other) {
  int64_t less = mine < other ? mine : other, more = mine < other ? other : mine;
  return less > 0 && less < more && more % less == 0 ? ". What jax.vmap maps on one rank must be mapped on all" : "";
}

ffi_error *call_fail_dropped(const struct call *call, const struct buffer *out, const char *format, ...) {
  char text[TEXT_BYTES];
  va_list arguments;
  va_start(arguments, format);
  describe_error(call, text, format, arguments);
  va_end(arguments);
  int64_t attributes[MAX_ATTRIBUTES];
  enum leaf place = attributes_of_tree(call, attributes);
  bool follow = place == LEAF_FIRST || place == LEAF_MIDDLE;
  if (follow && !atomic_load(&runtime.ends_on_error) && keep_error(call->operation->row, attributes, text)) {
    if (call->memory->host && out->count > 0) memset(out->data, 0xff, buffer_bytes(out));
    return NULL;
  }
  ffi_error *error = place == LEAF_LAST ? fail_kept(call, attributes) : NULL;
  return error != NULL ? error : fail_with(call, FFI_INVALID_ARGUMENT, text);
}

ffi_error *call_fail_kept(const struct call *call, ffi_error *error) {
  int64_t attributes[MAX_ATTRIBUTES];
  enum leaf place = attributes_of_tree(call, attributes);
  if (place == LEAF_ALONE || (place != LEAF_LAST && error == NULL)) return error;
  return call_first(call, fail_kept(call, attributes), error);
}

void call_forget_kept(const struct call *call) {
  int64_t attributes[MAX_ATTRIBUTES];
  if (attributes_of_tree(call, attributes) == LEAF_FIRST) free(take_kept(call->operation->row, attributes));
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

/* Return whether an error reports that a process has died. Some collectives of Open MPI then fail with another class.
 */
static bool reports_death(const struct call *call, int code) {
  if (runtime.failed == 0 || call->comm == NULL) return false;
  int class = runtime.abi->error_class(code);
  return class == runtime.failed || class == runtime.pending || class == runtime.revoked ||
         runtime.abi->is_broken(call->comm);
}

/* The error for a death. Other ranks learn of it by their own operations on this communicator, which all fail from now
 * on: none waits for a rank that has left an operation by this error. Python reads the number: _mpi/survival.py. `what`
 * and `more`: what the function of MPI did. */
static ffi_error *fail_process(const struct call *call, const char *what, const char *more) {
  runtime.abi->revoke(call->comm);
  return call_fail(call, FFI_UNAVAILABLE, "%s %s%s [a process has failed, communicator %" PRId64 "]", call->function,
                   what, more, call->comm->number & ((1 << PLACE_BITS) - 1));
}

ffi_error *call_confirm_result(const struct call *call, const struct operation *operation) {
  bool collective = attribute_of(operation, KIND_DERIVATIVE) >= 0 && attribute_of(operation, KIND_PLAN) < 0;
  if (runtime.failed == 0 || !collective || !runtime.abi->is_broken(call->comm)) return NULL;
  return fail_process(call, "returned without an error, and may not have written all of its result", "");
}

ffi_error *call_fail_mpi(const struct call *call, int code) {
  char reason[1024] = "", array[256];
  struct text facts = text_in(array, sizeof array);
  runtime.abi->error_text(code, reason);
  for (int i = 0; i < call->operation->attribute_count; i++)
    if (call->operation->attributes[i].kind == KIND_RANK || call->operation->attributes[i].kind == KIND_TAG)
      text_add(&facts, "; %s %" PRId64, call->operation->attributes[i].name, call->attributes[i]);
  /* A wait that speaks for the operation that it waits for has no buffers: requests/table.h. */
  for (int i = 0; i < call->operation->buffer_count && call->buffer_count > 0; i++)
    for (int k = call->first[i]; k < call->first[i + 1]; k++)
      if (call->buffers[k].type != NULL)
        text_add(&facts, "; %s %" PRId64 " of %s", call->operation->buffers[i].name, call->buffers[k].count,
                 call->buffers[k].type->name);
  if (reports_death(call, code)) {
    char failed[sizeof reason + 16];
    snprintf(failed, sizeof failed, "failed: %s", reason);
    return fail_process(call, failed, facts.characters);
  }
  if (call->sending) /* printed at once: if all ranks fail alike, nobody receives it */
    fprintf(stderr, "jaxmpi.%s on rank %d of %d: %s failed: %s. This rank waits until its own message is received\n",
            call_name(call), call->comm->rank, call->comm->size, call->function, reason);
  return call_fail(call, FFI_INTERNAL, "%s failed: %s%s", call->function, reason, facts.characters);
}

ffi_error *call_fail_unknown(const struct call *call, const char *attribute) {
  return call_fail(call, FFI_FAILED_PRECONDITION,
                   "its %s is not known here: this program was compiled in another process, or for another "
                   "communicator; compile it again here. Nothing was sent",
                   attribute);
}
