/* What the bodies of the operations share: how a body gets its buffers and attributes, and calls MPI.
 *
 * Only the sources with bodies and their helpers include this file. They are compiled once per ABI. A body gets
 * buffers and attributes by their names in ops.def. Which buffers exist depends on this rank's part in the operation.
 * If operand and result have equal pointers, XLA has aliased them.
 *
 * Threads: the transport chooses the thread for MPI calls, and this thread calls the bodies, without the GIL. It holds
 * runtime.lock where `serialize` is set. */
#ifndef JAXMPI_BODIES_H
#define JAXMPI_BODIES_H

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/buffers.h"
#include "core/failure.h"
#include "core/plan.h"
#include "execute/body.h"
#include "execute/chunks.h"
#include "execute/compare.h"
#include "mpi/mpi_table.h"
#include "observe/log.h"

static inline void find_buffers(struct call *c, struct buffer **buffers, size_t count) {
  for (size_t i = 0; i < count; i++) buffers[i] = &c->buffers[c->first[i]];
}

/* Declares a (attributes), b (buffers) and comm. */
#define ARGUMENTS(operation, call)                                             \
  struct operation##_attributes a;                                             \
  struct operation##_buffers b;                                                \
  memcpy(&a, (call)->attributes, sizeof a);                                    \
  find_buffers(call, (struct buffer **)(void *)&b, sizeof b / sizeof(void *)); \
  __attribute__((unused)) MPI_Comm comm = handle_of_comm((call)->comm)

/* Names the MPI function for errors and the log. The other arguments are the text of the log. */
#define BEGIN(call, name, ...)     \
  (call)->function = "MPI_" #name; \
  if ((call)->log.on) log_begin(call, __VA_ARGS__)

#define TRY(call, expression)                                    \
  do {                                                           \
    int code_ = (expression);                                    \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

static inline ffi_error *call_fail_in(struct call *call, const char *function, int code) {
  call->function = function;
  return call_fail_mpi(call, code);
}

/* TRY for one call of MPI. The error names the MPI function. */
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

/* Checks that a buffer which this rank needs was passed. Mixed versions of the package may not pass it. */
#define NEEDS(call, buffer)                                                                           \
  if ((buffer)->type == NULL)                                                                         \
  return call_fail(call, FFI_INTERNAL, "an array that rank %d needs is not passed: reinstall jaxmpi", \
                   (call)->comm->rank)

static inline MPI_Comm handle_of_comm(const struct communicator *comm) { return (MPI_Comm)comm->handle; }

static inline MPI_Datatype bytes_type(void) { return (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]; }

static inline MPI_Datatype element(const struct datatype *type) { return (MPI_Datatype)runtime.datatypes[type->code]; }

static inline MPI_Op handle_of(int64_t op) { return (MPI_Op)((const struct reduction *)object_of(op))->handle; }

/* A number of elements as count and datatype. If an int cannot hold the number, the span is one element of a derived
 * type that spans them all. This serves to send data. Reductions go chunk by chunk instead. */
struct span {
  int count;
  MPI_Datatype type;
  int code; /* an MPI error code; the span is valid if MPI_SUCCESS */
  bool derived;
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
    span.derived = span.code == MPI_SUCCESS;
    if (!span.derived) mpi.Type_free(&span.type);
  }
  mpi.Type_free(&types[0]);
  return span;
}

static inline struct span span_of(const struct datatype *type, int64_t count) {
  if (count > runtime.max_count) return span_make(count, element(type), type->bytes);
  return (struct span){.count = (int)count, .type = element(type), .code = MPI_SUCCESS};
}

static inline void span_free(struct span *span) {
  if (span->derived) mpi.Type_free(&span->type);
}

/* Makes one MPI call on a span and frees the span. */
#define TRY_SPAN(call, span, expression)                         \
  do {                                                           \
    int code_ = (span).code;                                     \
    if (code_ == MPI_SUCCESS) code_ = (expression);              \
    span_free(&(span));                                          \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

/* A reduction works element by element. A vector with more elements than an int holds is reduced in chunks. */
#define FOR_CHUNKS_OF(most, total, first, count)                                                                      \
  for (int64_t first = 0, count = 0; (count = (total) - first < (most) ? (total) - first : (most)) > 0 || first == 0; \
       first += count + (count == 0))
#define FOR_CHUNKS(call, total, first, count) FOR_CHUNKS_OF(runtime.max_count, total, first, count)

/* Reductions that are too long for MPI are put together from reductions of a part of a vector to one rank. */
/* Reduce the elements of `in` from `first` on to `out` of the rank `root`. */
static inline ffi_error *reduce_to(struct call *c, int root, const struct buffer *in, int64_t first, int64_t elements,
                                   void *out, MPI_Op op) {
  c->function = "MPI_Reduce";
  FOR_CHUNKS(c, elements, i, n) {
    void *to = root == c->comm->rank ? (char *)out + (size_t)i * in->type->bytes : NULL;
    TRY(c, mpi.Reduce(buffer_at(in, first + i), to, (int)n, element(in->type), op, root, handle_of_comm(c->comm)));
  }
  return NULL;
}

static inline struct span span_of_bytes(int64_t bytes) { return span_of(datatype_find(FFI_DTYPE_U8), bytes); }

/* The body of an operation. Each is defined in one of the sources that include this file. */
#define BODY(operation)                                            ABI_JOIN(body_##operation, ABI_NAME)
#define OPERATION(name, engine, divisibility, buffers, attributes) ffi_error *BODY(name)(struct call * c);
#include "core/ops.def"
#undef OPERATION

#endif
