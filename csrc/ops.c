/* The bodies of the operations: the only place that communicates. Compiled once per ABI.
 *
 * A body finds in `call` its buffers and attributes; `in` and `out` are what this rank passes, by its part. Equal
 * pointers mean that XLA has let the result take the operand's place.
 */
#include <inttypes.h>
#include <stdio.h>
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
#define BEGIN(call, name, ...)      \
  (call)->function = "MPI_" #name;  \
  if ((call)->traced) trace_begin(call, __VA_ARGS__)

#define TRY(call, expression)                                   \
  do {                                                          \
    int code_ = (expression);                                   \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

static MPI_Datatype element(const struct call *call) { return (MPI_Datatype)runtime.datatypes[call->dtype->code]; }

/* A number of elements in MPI's terms: itself, or, beyond what an int counts, one element of a type that spans them
 * all. Such a type moves data; reductions go piece by piece instead. */
struct span {
  int count;
  MPI_Datatype type;
  int code; /* of MPI; not MPI_SUCCESS: the span cannot be used */
  bool made;
};

static struct span span_make(const struct call *call, int64_t count) {
  int64_t limit = runtime.max_count, whole = count / limit, rest = count % limit;
  struct span span = {.count = 1};
  MPI_Datatype types[2] = {element(call), element(call)};
  int counts[2] = {(int)whole, (int)rest};
  MPI_Aint offsets[2] = {0, (MPI_Aint)(whole * limit * (int64_t)call->dtype->bytes)};
  if ((span.code = mpi.Type_contiguous((int)limit, element(call), &types[0])) != MPI_SUCCESS) return span;
  if ((span.code = mpi.Type_create_struct(2, counts, offsets, types, &span.type)) == MPI_SUCCESS) {
    span.made = true;
    span.code = mpi.Type_commit(&span.type);
  }
  mpi.Type_free(&types[0]);
  return span;
}

static struct span span_of(const struct call *call, int64_t count) {
  if (count > runtime.max_count) return span_make(call, count);
  return (struct span){.count = (int)count, .type = element(call), .code = MPI_SUCCESS};
}

/* Runs one MPI call on a span and gives the span back. */
#define TRY_SPAN(call, span, expression)                           \
  do {                                                             \
    int code_ = (span).code;                                       \
    if (code_ == MPI_SUCCESS) code_ = (expression);                \
    if ((span).made) mpi.Type_free(&(span).type);                  \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_);   \
  } while (0)

/* A reduction goes element by element, so a vector longer than an int counts is reduced in pieces. */
#define FOR_PIECES(call, total, first, count)                                                                        \
  for (int64_t first = 0, count = 0;                                                                                  \
       (count = (total) - first < runtime.max_count ? (total) - first : runtime.max_count) > 0 || first == 0;         \
       first += count + (count == 0))

static const void *piece_in(const struct call *call, int64_t first) {
  if (call->in == call->out) return ABI_IN_PLACE;
  return (const char *)call->in + first * (int64_t)call->dtype->bytes;
}

static void *piece_out(const struct call *call, int64_t first) {
  return (char *)call->out + first * (int64_t)call->dtype->bytes;
}

/* in: (*shape)  out: (size, *shape) */
static ffi_error *allgather(struct call *c) {
  ATTRIBUTES(allgather, c);
  BEGIN(c, Allgather, "with %" PRId64 " items and", c->in_count);
  struct span s = span_of(c, c->in_count);
  TRY_SPAN(c, s, mpi.Allgather(c->in, s.count, s.type, c->out, s.count, s.type, comm));
  return NULL;
}

/* in, out: (*shape), in place where they are one */
static ffi_error *allreduce(struct call *c) {
  ATTRIBUTES(allreduce, c);
  BEGIN(c, Allreduce, "with %" PRId64 " items and", c->in_count);
  FOR_PIECES(c, c->in_count, i, n)
  TRY(c, mpi.Allreduce(piece_in(c, i), piece_out(c, i), (int)n, element(c), (MPI_Op)(intptr_t)a.op, comm));
  return NULL;
}

/* in, out: (size, *shape) */
static ffi_error *alltoall(struct call *c) {
  ATTRIBUTES(alltoall, c);
  BEGIN(c, Alltoall, "with %" PRId64 " items and", c->in_count);
  struct span s = span_of(c, c->in_count / c->comm->size);
  TRY_SPAN(c, s, mpi.Alltoall(c->in, s.count, s.type, c->out, s.count, s.type, comm));
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
  void *data = root ? (void *)(uintptr_t)c->in : c->out;
  int64_t count = root ? c->in_count : c->out_count;
  BEGIN(c, Bcast, "from %d with %" PRId64 " items and", (int)a.root, count);
  struct span s = span_of(c, count);
  TRY_SPAN(c, s, mpi.Bcast(data, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* in: (*shape)  out on root alone: (size, *shape) */
static ffi_error *gather(struct call *c) {
  ATTRIBUTES(gather, c);
  BEGIN(c, Gather, "-> %d with %" PRId64 " items and", (int)a.root, c->in_count);
  struct span s = span_of(c, c->in_count);
  TRY_SPAN(c, s, mpi.Gather(c->in, s.count, s.type, c->out, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* in: (*shape)  out on root alone: (*shape), in place where they are one */
static ffi_error *reduce(struct call *c) {
  ATTRIBUTES(reduce, c);
  BEGIN(c, Reduce, "-> %d with %" PRId64 " items and", (int)a.root, c->in_count);
  bool root = c->comm->rank == a.root;
  FOR_PIECES(c, c->in_count, i, n) {
    const void *in = root ? piece_in(c, i) : (const char *)c->in + i * (int64_t)c->dtype->bytes;
    void *out = root ? piece_out(c, i) : NULL;
    TRY(c, mpi.Reduce(in, out, (int)n, element(c), (MPI_Op)(intptr_t)a.op, (int)a.root, comm));
  }
  return NULL;
}

/* in, out: (*shape), in place where they are one */
static ffi_error *scan(struct call *c) {
  ATTRIBUTES(scan, c);
  BEGIN(c, Scan, "with %" PRId64 " items and", c->in_count);
  FOR_PIECES(c, c->in_count, i, n)
  TRY(c, mpi.Scan(piece_in(c, i), piece_out(c, i), (int)n, element(c), (MPI_Op)(intptr_t)a.op, comm));
  return NULL;
}

/* in on root alone: (size, *shape)  out: (*shape) */
static ffi_error *scatter(struct call *c) {
  ATTRIBUTES(scatter, c);
  BEGIN(c, Scatter, "from %d with %" PRId64 " items and", (int)a.root, c->out_count);
  struct span s = span_of(c, c->out_count);
  TRY_SPAN(c, s, mpi.Scatter(c->in, s.count, s.type, c->out, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* in: any */
static ffi_error *send(struct call *c) {
  ATTRIBUTES(send, c);
  BEGIN(c, Send, "-> %d with tag %d and", (int)a.dest, (int)a.tag);
  struct span s = span_of(c, c->in_count);
  TRY_SPAN(c, s, mpi.Send(c->in, s.count, s.type, (int)a.dest, (int)a.tag, comm));
  return NULL;
}

/* How many whole elements a message held; -1 where MPI cannot say. */
static int64_t message_count(const struct call *call, const MPI_Status *status) {
  int count = 0;
  if (mpi.Get_count(status, element(call), &count) != MPI_SUCCESS || count == ABI_UNDEFINED) return -1;
  return count;
}

/* After a receive into all of `out`. A message that does not fill the template is an error, for the rest of the
 * result would be anything; who passes a status can ask it for the count, and finds zeros behind the message. */
static ffi_error *received(struct call *call, int code, MPI_Status *status, const struct span *span, intptr_t wanted) {
  if (code != MPI_SUCCESS) {
    int class = 0;
    if (mpi.Error_class(code, &class) != MPI_SUCCESS || class != ABI_ERR_TRUNCATE) return call_fail_mpi(call, code);
    char reason[1024] = "";
    runtime.backend->error_text(code, reason);
    int64_t count = message_count(call, status);
    char size[64] = "";
    if (count > call->out_count) snprintf(size, sizeof size, " of %" PRId64 " elements", count);
    return call_fail(call, FFI_INVALID_ARGUMENT,
                     "the message%s from rank %d with tag %d is longer than the template of %" PRId64
                     " elements of %s (%" PRId64 " bytes) and was cut: %s. Receive with a template of the shape and "
                     "dtype that is sent",
                     size, status->MPI_SOURCE, status->MPI_TAG, call->out_count, call->dtype->name,
                     call->out_count * (int64_t)call->dtype->bytes, reason);
  }
  if (wanted != 0) memcpy((void *)wanted, status, sizeof *status);
  size_t bytes = (size_t)call->out_count * call->dtype->bytes;
  if (status->MPI_SOURCE == ABI_PROC_NULL) {
    memset(call->out, 0, bytes);
    return NULL;
  }
  int units = 0;
  TRY(call, mpi.Get_count(status, span->type, &units));
  if (units == span->count) return NULL;
  int64_t count = message_count(call, status);
  if (wanted == 0 || count < 0)
    return call_fail(call, FFI_INVALID_ARGUMENT,
                     "the message from rank %d with tag %d has %" PRId64 " elements, the template %" PRId64
                     " of %s. Receive with a template of the shape and dtype that is sent, or pass status= to accept "
                     "shorter messages (the rest of the result is zero)",
                     status->MPI_SOURCE, status->MPI_TAG, count, call->out_count, call->dtype->name);
  size_t filled = (size_t)count * call->dtype->bytes;
  memset((char *)call->out + filled, 0, bytes - filled);
  return NULL;
}

/* out: the template's shape */
static ffi_error *recv(struct call *c) {
  ATTRIBUTES(recv, c);
  BEGIN(c, Recv, "<- %d with tag %d and", (int)a.source, (int)a.tag);
  MPI_Status status = {0};
  struct span s = span_of(c, c->out_count);
  int code = s.code;
  if (code == MPI_SUCCESS) code = mpi.Recv(c->out, s.count, s.type, (int)a.source, (int)a.tag, comm, &status);
  ffi_error *error = received(c, code, &status, &s, (intptr_t)a.status);
  if (s.made) mpi.Type_free(&s.type);
  return error;
}

/* in: any  out: the template's shape */
static ffi_error *sendrecv(struct call *c) {
  ATTRIBUTES(sendrecv, c);
  BEGIN(c, Sendrecv, "<- %d with tag %d -> %d with tag %d and", (int)a.source, (int)a.recvtag, (int)a.dest,
        (int)a.sendtag);
  MPI_Status status = {0};
  struct span in = span_of(c, c->in_count), out = span_of(c, c->out_count);
  int code = in.code != MPI_SUCCESS ? in.code : out.code;
  if (code == MPI_SUCCESS)
    code = mpi.Sendrecv(c->in, in.count, in.type, (int)a.dest, (int)a.sendtag, c->out, out.count, out.type,
                        (int)a.source, (int)a.recvtag, comm, &status);
  ffi_error *error = received(c, code, &status, &out, (intptr_t)a.status);
  if (in.made) mpi.Type_free(&in.type);
  if (out.made) mpi.Type_free(&out.type);
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
