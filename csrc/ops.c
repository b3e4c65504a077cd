/* The bodies of the operations: the only place that communicates. Compiled once per ABI.
 *
 * A body finds in `call` its buffers and attributes; `in` and `out` are what this rank passes, by its part. Equal
 * pointers mean that XLA has let the result take the operand's place.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "mpi_table.h"
#include "trace.h"

/* The attributes of an operation by name, as ops.def lists them. */
#define A(name) int64_t name;
#define OPERATION(name, attributes) \
  struct name##_attributes {        \
    attributes                      \
  };
#include "ops.def"
#undef OPERATION
#undef A
#define ATTRIBUTES(operation, call)         \
  struct operation##_attributes a;          \
  memcpy(&a, (call)->attributes, sizeof a); \
  MPI_Comm comm = (MPI_Comm)(call)->comm->handle

/* Names the MPI function for errors and for the trace, whose line says the rest. */
#define BEGIN(call, name, ...)     \
  (call)->function = "MPI_" #name; \
  if ((call)->traced) trace_begin(call, __VA_ARGS__)

#define TRY(call, expression)                                    \
  do {                                                           \
    int code_ = (expression);                                    \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

static inline MPI_Datatype element(const struct datatype *type) { return (MPI_Datatype)runtime.datatypes[type->code]; }

/* A number of elements in MPI's terms: itself, or, beyond what an int counts, one element of a type that spans them
 * all. Such a type moves data; reductions go piece by piece instead. */
struct span {
  int count;
  MPI_Datatype type;
  int code; /* of MPI; not MPI_SUCCESS: the span cannot be used */
  bool made;
};

static struct span span_make(int64_t count, MPI_Datatype type, size_t bytes) {
  int64_t limit = runtime.max_count, whole = count / limit, rest = count % limit;
  struct span span = {.count = 1};
  MPI_Datatype types[2] = {type, type};
  int counts[2] = {(int)whole, (int)rest};
  MPI_Aint offsets[2] = {0, (MPI_Aint)(whole * limit * (int64_t)bytes)};
  if ((span.code = mpi.Type_contiguous((int)limit, type, &types[0])) != MPI_SUCCESS) return span;
  if ((span.code = mpi.Type_create_struct(2, counts, offsets, types, &span.type)) == MPI_SUCCESS) {
    span.made = true;
    span.code = mpi.Type_commit(&span.type);
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

/* Runs one MPI call on a span and gives the span back. */
#define TRY_SPAN(call, span, expression)                         \
  do {                                                           \
    int code_ = (span).code;                                     \
    if (code_ == MPI_SUCCESS) code_ = (expression);              \
    span_free(&(span));                                          \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

/* A reduction goes element by element, so a vector longer than an int counts is reduced in pieces. */
#define FOR_PIECES(call, total, first, count)                                                             \
  for (int64_t first = 0, count = 0;                                                                      \
       (count = (total)-first < runtime.max_count ? (total)-first : runtime.max_count) > 0 || first == 0; \
       first += count + (count == 0))

static const void *piece_in(const struct call *call, int64_t first) {
  if (call->in.data == call->out.data) return ABI_IN_PLACE;
  return (const char *)call->in.data + first * (int64_t)call->in.type->bytes;
}

static void *piece_out(const struct call *call, int64_t first) {
  return (char *)call->out.data + first * (int64_t)call->out.type->bytes;
}

/* in: (*shape)  out: (size, *shape) */
static ffi_error *allgather(struct call *c) {
  ATTRIBUTES(allgather, c);
  BEGIN(c, Allgather, "with %" PRId64 " items and", c->in.count);
  struct span s = span_of(c->in.type, c->in.count);
  TRY_SPAN(c, s, mpi.Allgather(c->in.data, s.count, s.type, c->out.data, s.count, s.type, comm));
  return NULL;
}

/* in, out: (*shape), in place where they are one */
static ffi_error *allreduce(struct call *c) {
  ATTRIBUTES(allreduce, c);
  BEGIN(c, Allreduce, "with %" PRId64 " items and", c->in.count);
  FOR_PIECES(c, c->in.count, i, n)
  TRY(c, mpi.Allreduce(piece_in(c, i), piece_out(c, i), (int)n, element(c->in.type), (MPI_Op)(intptr_t)a.op, comm));
  return NULL;
}

/* in, out: (size, *shape) */
static ffi_error *alltoall(struct call *c) {
  ATTRIBUTES(alltoall, c);
  BEGIN(c, Alltoall, "with %" PRId64 " items and", c->in.count);
  struct span s = span_of(c->in.type, c->in.count / c->comm->size);
  TRY_SPAN(c, s, mpi.Alltoall(c->in.data, s.count, s.type, c->out.data, s.count, s.type, comm));
  return NULL;
}

static ffi_error *barrier(struct call *c) {
  ATTRIBUTES(barrier, c);
  BEGIN(c, Barrier, "with");
  TRY(c, mpi.Barrier(comm));
  return NULL;
}

/* root: in (*shape), which MPI only reads  others: out (*shape) */
static ffi_error *bcast(struct call *c) {
  ATTRIBUTES(bcast, c);
  bool root = c->comm->rank == a.root;
  const struct side *side = root ? &c->in : &c->out;
  BEGIN(c, Bcast, "from %d with %" PRId64 " items and", (int)a.root, side->count);
  struct span s = span_of(side->type, side->count);
  TRY_SPAN(c, s, mpi.Bcast(side->data, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* in: (*shape)  out on root alone: (size, *shape) */
static ffi_error *gather(struct call *c) {
  ATTRIBUTES(gather, c);
  BEGIN(c, Gather, "-> %d with %" PRId64 " items and", (int)a.root, c->in.count);
  struct span s = span_of(c->in.type, c->in.count);
  TRY_SPAN(c, s, mpi.Gather(c->in.data, s.count, s.type, c->out.data, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* in: (*shape)  out on root alone: (*shape), in place where they are one */
static ffi_error *reduce(struct call *c) {
  ATTRIBUTES(reduce, c);
  BEGIN(c, Reduce, "-> %d with %" PRId64 " items and", (int)a.root, c->in.count);
  bool root = c->comm->rank == a.root;
  FOR_PIECES(c, c->in.count, i, n) {
    const void *in = root ? piece_in(c, i) : (const char *)c->in.data + i * (int64_t)c->in.type->bytes;
    void *out = root ? piece_out(c, i) : NULL;
    TRY(c, mpi.Reduce(in, out, (int)n, element(c->in.type), (MPI_Op)(intptr_t)a.op, (int)a.root, comm));
  }
  return NULL;
}

/* in, out: (*shape), in place where they are one */
static ffi_error *scan(struct call *c) {
  ATTRIBUTES(scan, c);
  BEGIN(c, Scan, "with %" PRId64 " items and", c->in.count);
  FOR_PIECES(c, c->in.count, i, n)
  TRY(c, mpi.Scan(piece_in(c, i), piece_out(c, i), (int)n, element(c->in.type), (MPI_Op)(intptr_t)a.op, comm));
  return NULL;
}

/* in on root alone: (size, *shape)  out: (*shape) */
static ffi_error *scatter(struct call *c) {
  ATTRIBUTES(scatter, c);
  BEGIN(c, Scatter, "from %d with %" PRId64 " items and", (int)a.root, c->out.count);
  struct span s = span_of(c->out.type, c->out.count);
  TRY_SPAN(c, s, mpi.Scatter(c->in.data, s.count, s.type, c->out.data, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* in: any */
static ffi_error *send(struct call *c) {
  ATTRIBUTES(send, c);
  BEGIN(c, Send, "-> %d with tag %d and", (int)a.dest, (int)a.tag);
  struct span s = span_of(c->in.type, c->in.count);
  TRY_SPAN(c, s, mpi.Send(c->in.data, s.count, s.type, (int)a.dest, (int)a.tag, comm));
  return NULL;
}

/* Receiving. The message is matched first and its size compared with the template: a receive into too small a buffer
 * is an error by the standard, but Open MPI then writes past the end of the buffer where one process copies straight
 * out of the other's memory, and MPICH does not promise better. It also gives both sizes for the error, costs some
 * 0.04 us, and lets a message that does not fit be taken off the channel, so that the next one is not affected. */

/* Size of a matched message in elements of `type`; -1 where it is no whole number of them or cannot be told. */
static int64_t message_count(const MPI_Status *status, MPI_Datatype type) {
  MPI_Count large = ABI_UNDEFINED;
  int small = ABI_UNDEFINED;
  if (mpi.Get_count_c != NULL)
    mpi.Get_count_c(status, type, &large);
  else if (mpi.Get_count(status, type, &small) == MPI_SUCCESS && small != ABI_UNDEFINED)
    large = small;
  else if (mpi.Get_elements_x != NULL)
    mpi.Get_elements_x(status, type, &large);
  return large == ABI_UNDEFINED ? -1 : (int64_t)large;
}

/* Takes a message that does not fit off the channel, and says so. */
static ffi_error *reject(struct call *call, MPI_Message *message, const MPI_Status *status) {
  enum { BYTE = 6 }; /* uint8 */
  MPI_Datatype byte = (MPI_Datatype)runtime.datatypes[BYTE];
  int64_t sent = message_count(status, byte), expected = call->out.count * (int64_t)call->out.type->bytes;
  MPI_Status ignored;
  void *scratch = sent > 0 ? malloc((size_t)sent) : NULL;
  if (sent >= 0 && (scratch != NULL || sent == 0)) {
    struct span span = {.count = (int)sent, .type = byte, .code = MPI_SUCCESS};
    if (sent > runtime.max_count) span = span_make(sent, byte, 1);
    int code = span.code == MPI_SUCCESS ? mpi.Mrecv(scratch, span.count, span.type, message, &ignored) : span.code;
    span_free(&span);
    free(scratch);
    TRY(call, code);
  }
  return call_fail(call, FFI_INVALID_ARGUMENT,
                   "the message from rank %d with tag %d has %" PRId64 " bytes (%" PRId64
                   " elements of %s), the "
                   "template %" PRId64 " bytes (%" PRId64
                   " elements): it %s, so it was dropped. Receive with a "
                   "template of the shape and dtype that is sent%s",
                   status->MPI_SOURCE, status->MPI_TAG, sent, sent / (int64_t)call->out.type->bytes,
                   call->out.type->name, expected, call->out.count,
                   sent > expected ? "would be truncated" : "does not fill the result",
                   sent > expected ? "" : ", or pass status= to accept shorter ones (the rest of the result is zero)");
}

/* Receives into `out` and fills the user's status, if there is one. */
static ffi_error *receive(struct call *call, MPI_Comm comm, int source, int tag, intptr_t wanted) {
  MPI_Message message;
  MPI_Status status = {0};
  TRY(call, mpi.Mprobe(source, tag, comm, &message, &status));
  struct span span = span_of(call->out.type, call->out.count);
  int units = 0, code = span.code;
  if (code == MPI_SUCCESS) code = mpi.Get_count(&status, span.type, &units);
  bool fits = units == span.count || status.MPI_SOURCE == ABI_PROC_NULL;
  int64_t count = fits ? call->out.count : message_count(&status, element(call->out.type));
  bool accepted = fits || (wanted != 0 && count >= 0 && count < call->out.count);
  if (code == MPI_SUCCESS && accepted) code = mpi.Mrecv(call->out.data, span.count, span.type, &message, &status);
  span_free(&span);
  TRY(call, code);
  if (!accepted) return reject(call, &message, &status);
  if (wanted != 0) memcpy((void *)wanted, &status, sizeof status);
  if (status.MPI_SOURCE == ABI_PROC_NULL) count = 0;
  if (count < call->out.count) /* nothing, or less than the template: the rest is zero */
    memset((char *)call->out.data + (size_t)count * call->out.type->bytes, 0,
           (size_t)(call->out.count - count) * call->out.type->bytes);
  return NULL;
}

/* out: the template's shape */
static ffi_error *recv(struct call *c) {
  ATTRIBUTES(recv, c);
  BEGIN(c, Recv, "<- %d with tag %d and", (int)a.source, (int)a.tag);
  return receive(c, comm, (int)a.source, (int)a.tag, (intptr_t)a.status);
}

/* in: any  out: the template's shape */
static ffi_error *sendrecv(struct call *c) {
  ATTRIBUTES(sendrecv, c);
  BEGIN(c, Sendrecv, "<- %d with tag %d -> %d with tag %d and", (int)a.source, (int)a.recvtag, (int)a.dest,
        (int)a.sendtag);
  MPI_Request request;
  struct span s = span_of(c->in.type, c->in.count);
  TRY_SPAN(c, s, mpi.Isend(c->in.data, s.count, s.type, (int)a.dest, (int)a.sendtag, comm, &request));
  ffi_error *error = receive(c, comm, (int)a.source, (int)a.recvtag, (intptr_t)a.status);
  MPI_Status sent; /* a message that did not fit must not keep this rank's own from arriving */
  int code = mpi.Wait(&request, &sent);
  if (error == NULL && code != MPI_SUCCESS) return call_fail_mpi(c, code);
  return error;
}

/* The tables that the rest of the core sees. */
#define A(name) #name,
#define OPERATION(name, attributes) \
  {#name, name, (int)(sizeof(struct name##_attributes) / sizeof(int64_t)), {attributes}},
const struct operation operation_rows[] = {
#include "ops.def"
    {NULL, NULL, 0, {NULL}}};
#undef OPERATION
#undef A

enum {
#define OPERATION(name, attributes) ROW_##name,
#include "ops.def"
#undef OPERATION
  ROWS
};

#define OPERATION(name, attributes) \
  static ffi_error *host_##name(ffi_frame *frame) { return call_run(frame, &operation_rows[ROW_##name], &memory_host); }
#include "ops.def"
#undef OPERATION

#define OPERATION(name, attributes) host_##name,
ffi_handler *const host_table[] = {
#include "ops.def"
    NULL};
#undef OPERATION
