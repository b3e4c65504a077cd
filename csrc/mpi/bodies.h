/* What the bodies of the operations share: how a body gets its buffers and attributes, and makes a call of MPI.
 *
 * Included only by the sources with bodies, which are compiled once per ABI. A body gets its buffers and attributes by
 * their names in ops.def; which buffers there are depends on this rank's part in the operation. If operand and result
 * have equal pointers, XLA has aliased them.
 */
#ifndef JAXMPI_BODIES_H
#define JAXMPI_BODIES_H

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/buffers.h"
#include "core/call.h"
#include "core/compare.h"
#include "core/deadline.h"
#include "core/log.h"
#include "core/plan.h"
#include "core/requests.h"
#include "mpi/mpi_table.h"

/* The attributes and the buffers of an operation by name; for EACH the first buffer. */
#define A(kind, name)      int64_t name;
#define B(role, name)      struct buffer *name;
#define EACH(role, name)   struct buffer *name;
#define JOINED(role, name) struct buffer *name;
#define PARTLY(role, name) struct buffer *name;
#define OPERATION(name, divisibility, buffers, attributes) \
  struct name##_attributes {                               \
    attributes                                             \
  };                                                       \
  struct name##_buffers {                                  \
    buffers                                                \
  };
#include "core/ops.def"
#undef OPERATION
#undef A
#undef B
#undef EACH
#undef JOINED
#undef PARTLY

static inline void find_buffers(struct call *c, struct buffer **buffers, size_t count) {
  for (size_t i = 0; i < count; i++) buffers[i] = &c->buffers[c->first[i]];
}

/* Declares a (attributes), b (buffers) and comm. */
#define ARGUMENTS(operation, call)                                             \
  struct operation##_attributes a;                                             \
  struct operation##_buffers b;                                                \
  memcpy(&a, (call)->attributes, sizeof a);                                    \
  find_buffers(call, (struct buffer **)(void *)&b, sizeof b / sizeof(void *)); \
  __attribute__((unused)) MPI_Comm comm = (MPI_Comm)(call)->comm->handle

/* Names the MPI function for errors and the log; the other arguments are the text of the log. */
#define BEGIN(call, name, ...)     \
  (call)->function = "MPI_" #name; \
  if ((call)->logged) log_begin(call, __VA_ARGS__)

#define TRY(call, expression)                                    \
  do {                                                           \
    int code_ = (expression);                                    \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

static inline ffi_error *call_fail_in(struct call *call, const char *function, int code) {
  call->function = function;
  return call_fail_mpi(call, code);
}

/* The same for one call of MPI, whose function the error then names. */
#define TRY_MPI(call, name, ...)         \
  do {                                   \
    int code_ = mpi.name(__VA_ARGS__);   \
    if (code_ != MPI_SUCCESS) {          \
      (call)->function = "MPI_" #name;   \
      return call_fail_mpi(call, code_); \
    }                                    \
  } while (0)

#define PASS(expression)               \
  do {                                 \
    ffi_error *error_ = (expression);  \
    if (error_ != NULL) return error_; \
  } while (0)

/* A buffer that this rank's part in the operation needs. Two versions of the package, mixed, may not pass it. */
#define NEEDS(call, buffer)                                                                           \
  if ((buffer)->type == NULL)                                                                         \
  return call_fail(call, FFI_INTERNAL, "an array that rank %d needs is not passed: reinstall jaxmpi", \
                   (call)->comm->rank)

static inline MPI_Datatype element(const struct datatype *type) { return (MPI_Datatype)runtime.datatypes[type->code]; }

static inline MPI_Op handle_of(int64_t op) { return (MPI_Op)((const struct reduction *)object_of(op))->handle; }

/* A number of elements as count and datatype: if it exceeds an int, one element of a derived type that spans them all.
 * That serves to send data; reductions go chunk by chunk instead. */
struct span {
  int count;
  MPI_Datatype type;
  int code; /* an MPI error code; the span is valid if MPI_SUCCESS */
  bool made;
};

static inline struct span span_make(int64_t count, MPI_Datatype type, size_t bytes) {
  int64_t limit = runtime.max_count, whole = count / limit, rest = count % limit;
  struct span span = {.count = 1};
  MPI_Datatype types[2] = {type, type};
  int counts[2] = {(int)whole, (int)rest};
  MPI_Aint offsets[2] = {0, (MPI_Aint)(whole * limit * (int64_t)bytes)};
  if ((span.code = mpi.Type_contiguous((int)limit, type, &types[0])) != MPI_SUCCESS) return span;
  if ((span.code = mpi.Type_create_struct(2, counts, offsets, types, &span.type)) == MPI_SUCCESS) {
    span.code = mpi.Type_commit(&span.type);
    span.made = span.code == MPI_SUCCESS;
    if (!span.made) mpi.Type_free(&span.type);
  }
  mpi.Type_free(&types[0]);
  return span;
}

static inline struct span span_of(const struct datatype *type, int64_t count) {
  if (count > runtime.max_count) return span_make(count, element(type), type->bytes);
  return (struct span){.count = (int)count, .type = element(type), .code = MPI_SUCCESS};
}

static inline void span_free(struct span *span) {
  if (span->made) mpi.Type_free(&span->type);
}

/* Makes one MPI call on a span and frees the span. */
#define TRY_SPAN(call, span, expression)                         \
  do {                                                           \
    int code_ = (span).code;                                     \
    if (code_ == MPI_SUCCESS) code_ = (expression);              \
    span_free(&(span));                                          \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

/* A reduction works element by element, so a vector with more elements than an int holds is reduced in chunks. */
#define FOR_CHUNKS_OF(most, total, first, count)                                                                      \
  for (int64_t first = 0, count = 0; (count = (total) - first < (most) ? (total) - first : (most)) > 0 || first == 0; \
       first += count + (count == 0))
#define FOR_CHUNKS(call, total, first, count) FOR_CHUNKS_OF(runtime.max_count, total, first, count)

static inline struct span span_of_bytes(int64_t bytes) { return span_of(datatype_find(FFI_DTYPE_U8), bytes); }

/* --- messages --- */

#define message_count   ABI_LOCAL(message_count)
#define discard         ABI_LOCAL(discard)
#define receive_matched ABI_LOCAL(receive_matched)
#define fail_planned    ABI_LOCAL(fail_planned)
#define match_after_all ABI_LOCAL(match_after_all)
#define match_in_time   ABI_LOCAL(match_in_time)
#define await_match     ABI_LOCAL(await_match)
#define request_done    ABI_LOCAL(request_done)
#define wait_in_time    ABI_LOCAL(wait_in_time)
#define take_over       ABI_LOCAL(take_over)
#define keep_found      ABI_LOCAL(keep_found)
#define unpack_labelled ABI_LOCAL(unpack_labelled)

enum { NO_MEMORY = -1 };

/* See messages.c. */
int64_t message_count(const MPI_Status *status, MPI_Datatype type);
int discard(MPI_Message *message, int64_t bytes);

/* Receives a matched message into `out`, which it must fit. */
ffi_error *receive_matched(struct call *call, const struct buffer *out, MPI_Message *message, MPI_Status *status);

/* Puts a message that has been received, perhaps with a label, into `out`, which it must fit. */
ffi_error *unpack_labelled(struct call *call, const struct buffer *out, const char *data, int64_t bytes,
                           MPI_Status *status);

/* The error for a message of that many bytes which is not the one that a plan expects. */
ffi_error *fail_planned(const struct call *c, const struct peer *peer, int64_t bytes);

/* Waits for a message that no request expects, where some do. */
ffi_error *match_after_all(struct call *call, int source, int tag, MPI_Message *message, MPI_Status *status);

/* The same until a deadline; `late`: that is over, and the message stays in the channel. */
ffi_error *match_in_time(struct call *call, int source, int tag, double deadline, MPI_Message *message,
                         MPI_Status *status, bool *late);

/* Until a receive is matched. False: the deadline (0: none) is over, and it is not expected any more, nor is what else
 * the run expects. */
bool await_match(struct receive *receive, double deadline, int64_t run);

/* Whether what a request has begun is done, and its messages have come. It lets MPI progress. */
bool request_done(struct request *request);

/* Waits for all of these numbers' requests until a deadline. NULL: they are done, or there is another reason to go on,
 * and they can be waited for without one. */
ffi_error *wait_in_time(struct call *call, const struct buffer *ids, int count);

/* From here on a call is in the words of what has been started, errors above all; its own buffers are not. */
struct own {
  const struct operation *operation;
  short buffer_count;
};
struct own take_over(struct call *call, const struct request *request);
static inline void give_back(struct call *call, struct own own) {
  call->operation = own.operation, call->buffer_count = own.buffer_count;
}

/* Keeps a matched message for the receive that it is for, which has not begun. */
ffi_error *keep_found(const struct call *call, MPI_Message message, const MPI_Status *status);

/* Waits for a message, and matches it. That of an exchange which another rank has started is not for any tag. */
static inline ffi_error *match(struct call *call, int source, int tag, MPI_Message *message, MPI_Status *status) {
  if (atomic_load_explicit(&call->comm->expected, memory_order_relaxed) > 0)
    return match_after_all(call, source, tag, message, status);
  TRY_MPI(call, Mprobe, source, tag, (MPI_Comm)call->comm->handle, message, status);
  if (tag != ABI_ANY_TAG || status->MPI_SOURCE == ABI_PROC_NULL || status->MPI_TAG != plans_tag()) return NULL;
  PASS(keep_found(call, *message, status));
  return match_after_all(call, source, tag, message, status);
}

/* The body of an operation. */
#define BODY(operation)                                    ABI_JOIN(body_##operation, ABI_NAME)
#define OPERATION(name, divisibility, buffers, attributes) ffi_error *BODY(name)(struct call * c);
#include "core/ops.def"
#undef OPERATION

#endif
