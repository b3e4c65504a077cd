/* The bodies of the operations: all communication of data happens here. Compiled once per ABI.
 *
 * A body gets its buffers and attributes by their names in ops.def; which buffers there are depends on this rank's part
 * in the operation. If operand and result have equal pointers, XLA has aliased them.
 */
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core/buffers.h"
#include "core/call.h"
#include "core/compare.h"
#include "core/log.h"
#include "core/plan.h"
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
  MPI_Comm comm = (MPI_Comm)(call)->comm->handle

/* Names the MPI function for errors and the log; the other arguments are the text of the log. */
#define BEGIN(call, name, ...)     \
  (call)->function = "MPI_" #name; \
  if ((call)->logged) log_begin(call, __VA_ARGS__)

#define TRY(call, expression)                                    \
  do {                                                           \
    int code_ = (expression);                                    \
    if (code_ != MPI_SUCCESS) return call_fail_mpi(call, code_); \
  } while (0)

static ffi_error *call_fail_in(struct call *call, const char *function, int code) {
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

static struct span span_make(int64_t count, MPI_Datatype type, size_t bytes) {
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

/* Elements of an allreduce that MPI gets at a time. The libraries take memory as long as the vector for each call, from
 * some length on fresh pages of the system's, which cost more than the sum. */
static inline int64_t most_at_a_time(const struct call *c, const struct buffer *in) {
  if (c->comm->piece == 0 || (int64_t)buffer_bytes(in) < PIECES * c->comm->piece) return runtime.max_count;
  int64_t most = c->comm->piece / (int64_t)in->type->bytes;
  return most < runtime.max_count ? most : runtime.max_count;
}

/* The operand's chunk, or MPI_IN_PLACE if the result aliases the operand. XLA decides about aliasing on each rank
 * alone. For an allreduce the standard requires MPI_IN_PLACE on all ranks or on none, but no library passes this choice
 * to other ranks. */
static inline const void *chunk_of(const struct buffer *in, const struct buffer *out, int64_t first) {
  return in->data == out->data ? ABI_IN_PLACE : buffer_at(in, first);
}

/* in: (*shape)  out: (size, *shape) */
static ffi_error *allgather(struct call *c) {
  ARGUMENTS(allgather, c);
  BEGIN(c, Allgather, "with %" PRId64 " items and", b.in->count);
  struct span s = span_of(b.in->type, b.in->count);
  TRY_SPAN(c, s, mpi.Allgather(b.in->data, s.count, s.type, b.out->data, s.count, s.type, comm));
  return NULL;
}

/* in, out: (*shape), may be aliased */
static ffi_error *allreduce(struct call *c) {
  ARGUMENTS(allreduce, c);
  BEGIN(c, Allreduce, "with %" PRId64 " items and", b.in->count);
  int64_t most = most_at_a_time(c, b.in);
  FOR_CHUNKS_OF(most, b.in->count, i, n)
  TRY(c,
      mpi.Allreduce(chunk_of(b.in, b.out, i), buffer_at(b.out, i), (int)n, element(b.in->type), handle_of(a.op), comm));
  return NULL;
}

/* in, out: (size, *shape) */
static ffi_error *alltoall(struct call *c) {
  ARGUMENTS(alltoall, c);
  BEGIN(c, Alltoall, "with %" PRId64 " items and", b.in->count);
  struct span s = span_of(b.in->type, b.in->count / c->comm->size);
  TRY_SPAN(c, s, mpi.Alltoall(b.in->data, s.count, s.type, b.out->data, s.count, s.type, comm));
  return NULL;
}

static ffi_error *barrier(struct call *c) {
  ARGUMENTS(barrier, c);
  BEGIN(c, Barrier, "with");
  TRY(c, mpi.Barrier(comm));
  return NULL;
}

/* root: in (*shape), which MPI only reads, and out, which is absent or may be aliased with in  others: out (*shape) */
static ffi_error *bcast(struct call *c) {
  ARGUMENTS(bcast, c);
  bool root = c->comm->rank == a.root;
  const struct buffer *data = root ? b.in : b.out;
  NEEDS(c, data);
  BEGIN(c, Bcast, "from %d with %" PRId64 " items and", (int)a.root, data->count);
  if (root && b.out->count > 0 && b.out->data != b.in->data)
    PASS(call_move(c, b.out->data, b.in->data, buffer_bytes(b.in)));
  struct span s = span_of(data->type, data->count);
  TRY_SPAN(c, s, mpi.Bcast(data->data, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* found: truth values. If one is true, the error has the text `text`. Communicates nothing. */
static ffi_error *check(struct call *c) {
  ARGUMENTS(check, c);
  (void)comm;
  for (const struct buffer *found = b.found; found < &c->buffers[c->buffer_count]; found++)
    for (int64_t i = 0; i < found->count; i++)
      if (((const bool *)found->data)[i])
        return call_fail(c, FFI_FAILED_PRECONDITION, "%s", (const char *)object_of(a.text));
  return NULL;
}

/* Makes the communicator of a group. All ranks of the group do this, and no others. */
static ffi_error *connect(struct call *c) {
  ARGUMENTS(connect, c);
  (void)b;
  struct group *g = object_of(a.group);
  MPI_Group world, group;
  MPI_Comm made;
  BEGIN(c, Comm_create_group, "of %d ranks with", g->size);
  TRY_MPI(c, Comm_group, comm, &world);
  int code = mpi.Group_incl(world, g->size, g->ranks, &group);
  mpi.Group_free(&world);
  TRY(c, code);
  code = mpi.Comm_create_group(comm, group, 0, &made);
  mpi.Group_free(&group);
  TRY(c, code);
  g->handle = (intptr_t)made;
  return NULL;
}

/* in, out: (*shape), may be aliased. The result of rank 0, which MPI leaves undefined, is zero. */
static ffi_error *exscan(struct call *c) {
  ARGUMENTS(exscan, c);
  BEGIN(c, Exscan, "with %" PRId64 " items and", b.in->count);
  FOR_CHUNKS(c, b.in->count, i, n)
  TRY(c, mpi.Exscan(chunk_of(b.in, b.out, i), buffer_at(b.out, i), (int)n, element(b.in->type), handle_of(a.op), comm));
  return c->comm->rank > 0 ? NULL : call_zero(c, b.out->data, buffer_bytes(b.out));
}

/* in: (*shape)  out, on root only: (size, *shape) */
static ffi_error *gather(struct call *c) {
  ARGUMENTS(gather, c);
  if (c->comm->rank == a.root) NEEDS(c, b.out);
  BEGIN(c, Gather, "-> %d with %" PRId64 " items and", (int)a.root, b.in->count);
  struct span s = span_of(b.in->type, b.in->count);
  TRY_SPAN(c, s, mpi.Gather(b.in->data, s.count, s.type, b.out->data, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* in: (*shape)  out, on root only: (*shape), may be aliased */
static ffi_error *reduce(struct call *c) {
  ARGUMENTS(reduce, c);
  BEGIN(c, Reduce, "-> %d with %" PRId64 " items and", (int)a.root, b.in->count);
  bool root = c->comm->rank == a.root;
  if (root) NEEDS(c, b.out);
  FOR_CHUNKS(c, b.in->count, i, n) {
    const void *in = root ? chunk_of(b.in, b.out, i) : buffer_at(b.in, i);
    void *out = root ? buffer_at(b.out, i) : NULL;
    TRY(c, mpi.Reduce(in, out, (int)n, element(b.in->type), handle_of(a.op), (int)a.root, comm));
  }
  return NULL;
}

/* The elements of `in` from `first` on, reduced to `out` of that rank. */
static ffi_error *reduce_to(struct call *c, int root, const struct buffer *in, int64_t first, int64_t elements,
                            void *out, MPI_Op op) {
  MPI_Comm comm = (MPI_Comm)c->comm->handle;
  c->function = "MPI_Reduce";
  FOR_CHUNKS(c, elements, i, n) {
    void *to = root == c->comm->rank ? (char *)out + (size_t)i * in->type->bytes : NULL;
    TRY(c, mpi.Reduce(buffer_at(in, first + i), to, (int)n, element(in->type), op, root, comm));
  }
  return NULL;
}

/* in: (size, *shape)  out: (*shape) */
static ffi_error *reduce_scatter(struct call *c) {
  ARGUMENTS(reduce_scatter, c);
  BEGIN(c, Reduce_scatter_block, "with %" PRId64 " items and", b.out->count);
  if (b.out->count > runtime.max_count) {
    for (int r = 0; r < c->comm->size; r++)
      PASS(reduce_to(c, r, b.in, r * b.out->count, b.out->count, b.out->data, handle_of(a.op)));
    return NULL;
  }
  TRY(c,
      mpi.Reduce_scatter_block(b.in->data, b.out->data, (int)b.out->count, element(b.in->type), handle_of(a.op), comm));
  return NULL;
}

/* in, out: (*shape), may be aliased */
static ffi_error *scan(struct call *c) {
  ARGUMENTS(scan, c);
  BEGIN(c, Scan, "with %" PRId64 " items and", b.in->count);
  FOR_CHUNKS(c, b.in->count, i, n)
  TRY(c, mpi.Scan(chunk_of(b.in, b.out, i), buffer_at(b.out, i), (int)n, element(b.in->type), handle_of(a.op), comm));
  return NULL;
}

/* in, on root only: (size, *shape)  out: (*shape) */
static ffi_error *scatter(struct call *c) {
  ARGUMENTS(scatter, c);
  if (c->comm->rank == a.root) NEEDS(c, b.in);
  BEGIN(c, Scatter, "from %d with %" PRId64 " items and", (int)a.root, b.out->count);
  struct span s = span_of(b.out->type, b.out->count);
  TRY_SPAN(c, s, mpi.Scatter(b.in->data, s.count, s.type, b.out->data, s.count, s.type, (int)a.root, comm));
  return NULL;
}

/* --- arrays divided along their first axis by counts of rows --- */

/* A part of an array for each rank, one behind the other. The counts are what ranks have told each other: a negative
 * one, of nothing, says that a rank cannot do its part, so that all ranks still make the same calls of MPI. */
struct parts {
  int64_t elements;      /* of all parts */
  int *counts, *offsets; /* of each part, in units of `type` */
  MPI_Datatype type;     /* an element; a row, where elements are too many for an int */
  struct span row;
  int invalid; /* the first rank with a negative count; -1: none */
};

static inline int64_t row_count(const struct buffer *counts, int rank) { return ((const int32_t *)counts->data)[rank]; }

static ffi_error *check_counts(const struct call *c, const struct buffer *counts) {
  if (c->leaves == NULL && counts->count == c->comm->size && counts->type->code == FFI_DTYPE_S32) return NULL;
  return call_fail(c, FFI_INTERNAL, "counts are not a 32-bit integer for each rank: reinstall jaxmpi");
}

static ffi_error *parts_make(const struct call *c, const struct buffer *counts, const struct datatype *type,
                             int64_t row, struct parts *parts) {
  int size = c->comm->size;
  int64_t rows = 0;
  *parts = (struct parts){.type = element(type), .invalid = -1};
  PASS(check_counts(c, counts));
  for (int r = size - 1; r >= 0; r--) {
    rows += row_count(counts, r) > 0 ? row_count(counts, r) : 0;
    if (row_count(counts, r) < 0) parts->invalid = r;
  }
  if (row < 0 || __builtin_mul_overflow(rows, row, &parts->elements))
    return call_fail(c, FFI_INTERNAL, "rows of %" PRId64 " elements: reinstall jaxmpi", row);
  if (rows > INT_MAX)
    return call_fail(c, FFI_UNIMPLEMENTED, "%" PRId64 " rows are more than an int counts: make the rows longer", rows);
  bool by_rows = parts->elements > runtime.max_count;
  if (by_rows) {
    parts->row = span_make(row, element(type), type->bytes);
    if (parts->row.code != MPI_SUCCESS)
      return call_fail_in((struct call *)(uintptr_t)c, "MPI_Type_commit", parts->row.code);
    parts->type = parts->row.type;
  }
  parts->counts = malloc(2 * (size_t)size * sizeof(int));
  if (parts->counts == NULL) {
    span_free(&parts->row);
    return call_fail(c, FFI_INTERNAL, "no memory for the counts of %d ranks", size);
  }
  parts->offsets = parts->counts + size;
  for (int r = 0, at = 0; r < size; r++) {
    int count = row_count(counts, r) > 0 ? (int)row_count(counts, r) : 0;
    parts->counts[r] = by_rows ? count : (int)(count * row);
    parts->offsets[r] = at;
    at += parts->counts[r];
  }
  return NULL;
}

static void parts_free(struct parts *parts) {
  free(parts->counts);
  span_free(&parts->row);
}

/* Where `elements` are received: in `out`, or, if they do not fit, in memory of the host's, since the other ranks send
 * them in any case. */
struct landing {
  void *data, *own;
  int64_t elements;
};

static ffi_error *landing_make(const struct call *c, const struct buffer *out, int64_t elements,
                               struct landing *landing) {
  *landing = (struct landing){out->data, NULL, elements};
  if (elements <= out->count) return NULL;
  landing->data = landing->own = malloc((size_t)elements * out->type->bytes);
  if (landing->own == NULL)
    return call_fail(c, FFI_INTERNAL, "no memory for the %" PRId64 " elements that have been sent", elements);
  return NULL;
}

/* After the calls of MPI, the last of which has returned `code`. The rest of the result is zero. */
static ffi_error *landed(struct call *c, const struct buffer *out, int64_t row, struct landing *landing, int code) {
  free(landing->own);
  TRY(c, code);
  if (landing->elements > out->count)
    return call_fail(c, FFI_INVALID_ARGUMENT,
                     "rows sent to this rank: %" PRId64 "; its result has room for %" PRId64
                     ", so nothing was written. Make room with a larger rows=",
                     landing->elements / row, out->count / row);
  int64_t rest = out->count - landing->elements;
  return rest > 0 ? call_zero(c, buffer_at(out, landing->elements), (size_t)rest * out->type->bytes) : NULL;
}

/* Counts of rows that this rank passes to MPI: Python has compared them with the array. */
static ffi_error *check_rows(const struct call *c, const struct buffer *in, int64_t elements) {
  if (elements <= in->count) return NULL;
  return call_fail(c, FFI_INTERNAL, "counts of %" PRId64 " elements of an array of %" PRId64 ": reinstall jaxmpi",
                   elements, in->count);
}

static ffi_error *fail_counts(const struct call *c, int rank) {
  if (c->operation->row == ROW_reduce_scatterv)
    return call_fail(c, FFI_INVALID_ARGUMENT,
                     "a rank has passed a count of rows that is negative, or the counts of all ranks together are more "
                     "than the rows of the array: nothing was reduced");
  return call_fail(c, FFI_INVALID_ARGUMENT,
                   "rank %d%s has passed a count of rows that is negative, or counts that are more than the rows of "
                   "its array: nothing was received from it",
                   rank, rank == c->comm->rank ? " (this one)" : "");
}

/* Of counts that all ranks know: then all of them come to the same. */
static ffi_error *parts_of_all(const struct call *c, const struct buffer *counts, const struct datatype *type,
                               int64_t row, struct parts *parts) {
  PASS(parts_make(c, counts, type, row, parts));
  if (parts->invalid < 0) return NULL;
  parts_free(parts);
  return fail_counts(c, parts->invalid);
}

/* in: at least the rows of this rank  out: at least those of all ranks */
static ffi_error *allgatherv(struct call *c) {
  ARGUMENTS(allgatherv, c);
  BEGIN(c, Allgatherv, "with %" PRId64 " items and", b.in->count);
  struct parts parts;
  struct landing to = {NULL, NULL, 0};
  PASS(parts_of_all(c, b.counts, b.in->type, a.row, &parts));
  ffi_error *error = check_rows(c, b.in, row_count(b.counts, c->comm->rank) * a.row);
  int code = MPI_SUCCESS;
  if (error == NULL) error = landing_make(c, b.out, parts.elements, &to);
  if (error == NULL)
    code = mpi.Allgatherv(b.in->data, parts.counts[c->comm->rank], parts.type, to.data, parts.counts, parts.offsets,
                          parts.type, comm);
  parts_free(&parts);
  if (error == NULL) error = landed(c, b.out, a.row, &to, code);
  return error;
}

/* With JAXMPI_CHECK: each rank expects what the others send. All ranks come to the same verdict. */
static ffi_error *compare_counts(struct call *c, const struct buffer *sent, const struct buffer *received) {
  MPI_Comm comm = (MPI_Comm)c->comm->handle;
  MPI_Datatype type = element(sent->type);
  int size = c->comm->size, wrong = -1, other = -1;
  PASS(check_counts(c, sent));
  PASS(check_counts(c, received));
  int32_t *told = malloc((size_t)size * sizeof *told), tells = 0;
  if (told == NULL) return call_fail(c, FFI_INTERNAL, "no memory to compare the counts");
  int code = mpi.Alltoall(sent->data, 1, type, told, 1, type, comm);
  for (int r = size - 1; code == MPI_SUCCESS && r >= 0; r--)
    if (told[r] != row_count(received, r)) wrong = r, tells = told[r];
  if (code == MPI_SUCCESS) code = mpi.Allgather(&wrong, 1, type, told, 1, type, comm);
  for (int r = size - 1; code == MPI_SUCCESS && r >= 0; r--)
    if (told[r] >= 0) other = r;
  free(told);
  TRY(c, code);
  if (wrong >= 0)
    return call_fail(c, FFI_FAILED_PRECONDITION,
                     "the ranks differ: rank %d sends %d rows to this rank, which expects %d. Nothing was sent", wrong,
                     (int)tells, (int)row_count(received, wrong));
  if (other >= 0)
    return call_fail(c, FFI_FAILED_PRECONDITION,
                     "the ranks differ: rank %d expects other numbers of rows than are sent to it. Nothing was sent",
                     other);
  return NULL;
}

/* in: at least the rows that this rank sends  out: at least those that it receives */
static ffi_error *alltoallv(struct call *c) {
  ARGUMENTS(alltoallv, c);
  BEGIN(c, Alltoallv, "with %" PRId64 " items and", b.in->count);
  struct parts sent, received;
  struct landing to = {NULL, NULL, 0};
  if (c->compared) PASS(compare_counts(c, b.sent, b.received));
  PASS(parts_make(c, b.sent, b.in->type, a.row, &sent));
  ffi_error *error = parts_make(c, b.received, b.in->type, a.row, &received);
  if (error != NULL) return parts_free(&sent), error;
  error = check_rows(c, b.in, sent.elements);
  if (error == NULL) error = landing_make(c, b.out, received.elements, &to);
  int code = MPI_SUCCESS;
  if (error == NULL)
    code = mpi.Alltoallv(b.in->data, sent.counts, sent.offsets, sent.type, to.data, received.counts, received.offsets,
                         received.type, comm);
  parts_free(&sent);
  parts_free(&received);
  if (error == NULL) error = landed(c, b.out, a.row, &to, code);
  if (error != NULL) return error;
  if (sent.invalid >= 0) return fail_counts(c, c->comm->rank);
  return received.invalid >= 0 ? fail_counts(c, received.invalid) : NULL;
}

/* in: at least the rows of this rank  out, on root only: at least those of all ranks */
static ffi_error *gatherv(struct call *c) {
  ARGUMENTS(gatherv, c);
  bool root = c->comm->rank == a.root;
  if (root) NEEDS(c, b.out);
  BEGIN(c, Gatherv, "-> %d with %" PRId64 " items and", (int)a.root, b.in->count);
  struct parts parts;
  struct landing to = {NULL, NULL, 0};
  PASS(parts_of_all(c, b.counts, b.in->type, a.row, &parts));
  ffi_error *error = check_rows(c, b.in, row_count(b.counts, c->comm->rank) * a.row);
  int code = MPI_SUCCESS;
  if (error == NULL && root) error = landing_make(c, b.out, parts.elements, &to);
  if (error == NULL)
    code = mpi.Gatherv(b.in->data, parts.counts[c->comm->rank], parts.type, to.data, parts.counts, parts.offsets,
                       parts.type, (int)a.root, comm);
  parts_free(&parts);
  if (error == NULL && root) return landed(c, b.out, a.row, &to, code);
  if (error == NULL) TRY(c, code);
  return error;
}

/* in: at least the rows of all ranks  out: at least those of this rank */
static ffi_error *reduce_scatterv(struct call *c) {
  ARGUMENTS(reduce_scatterv, c);
  BEGIN(c, Reduce_scatter, "with %" PRId64 " items and", b.in->count);
  struct parts parts;
  struct landing to = {NULL, NULL, 0};
  int rank = c->comm->rank, code = MPI_SUCCESS;
  PASS(parts_of_all(c, b.counts, b.in->type, a.row, &parts));
  ffi_error *error = check_rows(c, b.in, parts.elements);
  if (error == NULL) error = landing_make(c, b.out, row_count(b.counts, rank) * a.row, &to);
  if (error == NULL && parts.row.made) { /* which no reduction takes */
    int64_t first = 0;
    for (int r = 0; r < c->comm->size && error == NULL; r++) {
      int64_t elements = row_count(b.counts, r) * a.row;
      error = reduce_to(c, r, b.in, first, elements, to.data, handle_of(a.op));
      first += elements;
    }
    if (error != NULL) free(to.own);
  } else if (error == NULL) {
    code = mpi.Reduce_scatter(b.in->data, to.data, parts.counts, parts.type, handle_of(a.op), comm);
  }
  parts_free(&parts);
  if (error == NULL) error = landed(c, b.out, a.row, &to, code);
  return error;
}

/* in, on root only: at least the rows of all ranks  out: at least those of this rank */
static ffi_error *scatterv(struct call *c) {
  ARGUMENTS(scatterv, c);
  int rank = c->comm->rank;
  if (rank == a.root) NEEDS(c, b.in);
  BEGIN(c, Scatterv, "from %d with %" PRId64 " items and", (int)a.root, b.out->count);
  struct parts parts;
  struct landing to = {NULL, NULL, 0};
  PASS(parts_make(c, b.counts, b.out->type, a.row, &parts));
  if (parts.invalid >= 0) return parts_free(&parts), fail_counts(c, (int)a.root);
  ffi_error *error = rank == a.root ? check_rows(c, b.in, parts.elements) : NULL;
  int code = MPI_SUCCESS;
  if (error == NULL) error = landing_make(c, b.out, row_count(b.counts, rank) * a.row, &to);
  if (error == NULL)
    code = mpi.Scatterv(b.in->data, parts.counts, parts.offsets, parts.type, to.data, parts.counts[rank], parts.type,
                        (int)a.root, comm);
  parts_free(&parts);
  if (error == NULL) error = landed(c, b.out, a.row, &to, code);
  return error;
}

/* What is sent of a buffer: itself, or with JAXMPI_CHECK a copy behind a label. */
struct parcel {
  const void *data;
  struct span span;
  struct label *copy;
};

/* NULL: no label is wanted, or there is no memory for one; the message is then not checked. */
static struct label *copy_labelled(const struct call *call, const struct buffer *in) {
  if (!atomic_load_explicit(&runtime.labels, memory_order_relaxed)) return NULL;
  struct label *copy = malloc(sizeof *copy + buffer_bytes(in));
  if (copy == NULL) return NULL;
  *copy = label_of(call, in);
  if (in->count > 0) memcpy(copy + 1, in->data, buffer_bytes(in));
  return copy;
}

static inline struct span span_of_bytes(int64_t bytes) { return span_of(datatype_find(FFI_DTYPE_U8), bytes); }

static inline struct parcel parcel_of(const struct call *call, const struct buffer *in) {
  struct label *copy = call->labelled ? copy_labelled(call, in) : NULL;
  if (copy == NULL) return (struct parcel){.data = in->data, .span = span_of(in->type, in->count)};
  return (struct parcel){copy, span_of_bytes((int64_t)(sizeof *copy + buffer_bytes(in))), copy};
}

static inline void parcel_free(struct parcel *parcel) {
  span_free(&parcel->span);
  free(parcel->copy);
}

/* in: any shape */
static ffi_error *send(struct call *c) {
  ARGUMENTS(send, c);
  BEGIN(c, Send, "-> %d with tag %d and", (int)a.dest, (int)a.tag);
  struct parcel in = parcel_of(c, b.in);
  int code = in.span.code;
  if (code == MPI_SUCCESS) code = mpi.Send(in.data, in.span.count, in.span.type, (int)a.dest, (int)a.tag, comm);
  parcel_free(&in);
  TRY(c, code);
  return NULL;
}

/* Receiving. A message is matched first, and its size is compared with the template. A receive into a buffer that is
 * too small is an error by the standard, but where one process copies directly from the other's memory, Open MPI then
 * writes past the end of the buffer, and MPICH promises nothing better. Matching also gives both sizes for the error,
 * and a message that does not fit can be taken off the channel, so that the next one is not affected. It costs about
 * 0.04 us. */

/* Size of a matched message in elements of `type`; -1 if it is not a whole number of elements or not known. */
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

/* Receives a matched message as bytes. Returns an MPI error code. */
static int take(MPI_Message *message, void *data, int64_t bytes, MPI_Status *status) {
  struct span span = span_of_bytes(bytes);
  int code = span.code == MPI_SUCCESS ? mpi.Mrecv(data, span.count, span.type, message, status) : span.code;
  span_free(&span);
  return code;
}

/* Receives a matched message of that many bytes and drops it. Returns an MPI error code, or NO_MEMORY: then the message
 * stays matched and is never received. */
enum { NO_MEMORY = -1 };
static int discard(MPI_Message *message, int64_t bytes) {
  void *scratch = bytes > 0 ? malloc((size_t)bytes) : NULL;
  if (bytes < 0 || (bytes > 0 && scratch == NULL)) return NO_MEMORY;
  MPI_Status ignored;
  int code = take(message, scratch, bytes, &ignored);
  free(scratch);
  return code;
}

/* The error for a message of `sent` bytes that does not fit the template. `code`: of its removal from the channel;
 * `by_status`: the user passes a status; `label`: NULL if it has none. */
static ffi_error *misfit(const struct call *call, const struct buffer *out, int64_t sent, const MPI_Status *status,
                         int code, bool by_status, const struct label *label) {
  int64_t width = (int64_t)out->type->bytes, expected = out->count * width;
  bool longer = sent > expected;
  const char *what = sent < 0 ? "has a size that MPI cannot tell" : longer ? "would be truncated" : "is too short";
  const char *then = code == MPI_SUCCESS ? "dropped" : "left unreceived, for it could not be taken off the channel";
  return call_fail(call, FFI_INVALID_ARGUMENT,
                   "the message from rank %d with tag %d%s%.200s has %" PRId64 " bytes (%" PRId64
                   " elements of %s), the "
                   "template %" PRId64 " bytes (%" PRId64
                   " elements): it %s, so it was %s. Receive with a template of "
                   "the shape and dtype that is sent%s",
                   status->MPI_SOURCE, status->MPI_TAG, label != NULL && label->lines[0] != '\0' ? " " : "",
                   label != NULL ? label->lines : "", sent, sent / width, out->type->name, expected, out->count, what,
                   then, longer || by_status ? "" : ", or pass status= to accept shorter ones (the rest is then zero)");
}

/* Drops a message that does not fit the template; returns the error. */
static ffi_error *reject(struct call *call, const struct buffer *out, MPI_Message *message, const MPI_Status *status,
                         bool by_status) {
  int64_t sent = message_count(status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
  int code = discard(message, sent);
  if (code != MPI_SUCCESS && code != NO_MEMORY) return call_fail_in(call, "MPI_Mrecv", code);
  return misfit(call, out, sent, status, code, by_status, NULL);
}

/* What remains once a message of `count` elements is in the template. */
static inline ffi_error *received(struct call *call, const struct buffer *out, int64_t count, const MPI_Status *status,
                                  MPI_Status *users) {
  if (users != NULL) *users = *status;
  if (count < out->count) /* a short message, or none (MPI_PROC_NULL): the rest is zero */
    return call_zero(call, buffer_at(out, count), (size_t)(out->count - count) * out->type->bytes);
  return NULL;
}

/* Puts a message, which has been received, into the template, if it is of its dtype and fits. */
static ffi_error *unpack(struct call *call, const struct buffer *out, const char *data, int64_t bytes,
                         MPI_Status *status, MPI_Status *users) {
  const struct label *label = label_find(data, bytes);
  int64_t width = (int64_t)out->type->bytes, room = out->count * width;
  const struct datatype *sent = label != NULL ? datatype_find((int)label->dtype) : NULL;
  if (label != NULL) data += sizeof *label, bytes -= (int64_t)sizeof *label;
  if (sent != NULL && sent != out->type)
    return call_fail(call, FFI_INVALID_ARGUMENT,
                     "the message from rank %d with tag %d%s%.200s is of %" PRId64 " %s, the template of %" PRId64
                     " %s, so it was dropped. Receive with a template of the shape and dtype that is sent",
                     status->MPI_SOURCE, status->MPI_TAG, label->lines[0] != '\0' ? " " : "", label->lines,
                     label->count, sent->name, out->count, out->type->name);
  if (bytes > room || bytes % width != 0 || (bytes < room && users == NULL))
    return misfit(call, out, bytes, status, MPI_SUCCESS, users != NULL, label);
  if (bytes > 0) memcpy(out->data, data, (size_t)bytes);
  if (users != NULL && bytes > INT_MAX && mpi.Status_set_elements_x != NULL)
    TRY_MPI(call, Status_set_elements_x, status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8], (MPI_Count)bytes);
  else if (users != NULL && bytes <= INT_MAX)
    TRY_MPI(call, Status_set_elements, status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8], (int)bytes);
  return received(call, out, bytes / width, status, users);
}

/* The same as `receive` of a message that may have a label. */
static ffi_error *receive_labelled(struct call *call, const struct buffer *out, MPI_Message *message,
                                   MPI_Status *status, MPI_Status *users) {
  int64_t bytes = message_count(status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
  char *data = bytes >= 0 ? malloc((size_t)bytes + 1) : NULL;
  if (data == NULL) return reject(call, out, message, status, users != NULL);
  int code = take(message, data, bytes, status);
  ffi_error *error =
      code == MPI_SUCCESS ? unpack(call, out, data, bytes, status, users) : call_fail_in(call, "MPI_Mrecv", code);
  free(data);
  return error;
}

/* Receives into `out`, as described by `span`; fills the user's status unless that is NULL. */
static inline ffi_error *receive(struct call *call, const struct buffer *out, const struct span *span, MPI_Comm comm,
                                 int source, int tag, MPI_Status *users) {
  MPI_Message message;
  MPI_Status status;
  int units = 0;
  TRY_MPI(call, Mprobe, source, tag, comm, &message, &status);
  call->from = status.MPI_SOURCE;
  call->from_tag = status.MPI_TAG;
  TRY_MPI(call, Get_count, &status, span->type, &units);
  bool nobody = status.MPI_SOURCE == ABI_PROC_NULL, fits = units == span->count || nobody;
  if (call->labelled && !nobody) return receive_labelled(call, out, &message, &status, users);
  int64_t count = nobody ? 0 : fits ? out->count : message_count(&status, element(out->type));
  if (!fits && (users == NULL || count < 0 || count > out->count))
    return reject(call, out, &message, &status, users != NULL);
  TRY_MPI(call, Mrecv, out->data, span->count, span->type, &message, &status);
  return received(call, out, count, &status, users);
}

/* out: the template's shape */
static ffi_error *recv(struct call *c) {
  ARGUMENTS(recv, c);
  BEGIN(c, Recv, "<- %d with tag %d and", (int)a.source, (int)a.tag);
  struct span out = span_of(b.out->type, b.out->count);
  TRY(c, out.code);
  ffi_error *error = receive(c, b.out, &out, comm, (int)a.source, (int)a.tag, object_of(a.status));
  span_free(&out);
  return error;
}

/* in: any shape  out: the template's shape */
static ffi_error *sendrecv(struct call *c) {
  ARGUMENTS(sendrecv, c);
  BEGIN(c, Sendrecv, "<- %d with tag %d -> %d with tag %d and", (int)a.source, (int)a.recvtag, (int)a.dest,
        (int)a.sendtag);
  struct parcel in = parcel_of(c, b.in);
  struct span out = span_of(b.out->type, b.out->count);
  MPI_Request request;
  ffi_error *error = NULL;
  int code = in.span.code != MPI_SUCCESS ? in.span.code : out.code;
  if (code == MPI_SUCCESS) {
    c->function = "MPI_Isend";
    code = mpi.Isend(in.data, in.span.count, in.span.type, (int)a.dest, (int)a.sendtag, comm, &request);
  }
  if (code == MPI_SUCCESS) {
    c->sending = true;
    error = receive(c, b.out, &out, comm, (int)a.source, (int)a.recvtag, object_of(a.status));
    MPI_Status sent; /* completed after an error too, so that this rank's message arrives */
    c->sending = false;
    code = mpi.Wait(&request, &sent);
    c->function = code == MPI_SUCCESS ? "MPI_Sendrecv" : "MPI_Wait";
  }
  parcel_free(&in);
  span_free(&out);
  return error != NULL || code == MPI_SUCCESS ? error : call_fail_mpi(c, code);
}

/* Receives the message of a peer into the stage, if it is the one that is expected; otherwise drops it. */
static ffi_error *receive_planned(struct call *c, const struct plan *plan, const struct peer *peer, char *stage,
                                  uint64_t expected) {
  MPI_Comm comm = (MPI_Comm)c->comm->handle;
  MPI_Message message;
  MPI_Status status;
  uint64_t label = ~expected;
  TRY_MPI(c, Mprobe, peer->rank, plan->tag, comm, &message, &status);
  int64_t bytes = message_count(&status, (MPI_Datatype)runtime.datatypes[FFI_DTYPE_U8]);
  int code;
  if (bytes == peer->bytes) {
    code = take(&message, stage + peer->stage, bytes, &status);
    memcpy(&label, stage + peer->stage, LABEL_BYTES);
  } else {
    code = discard(&message, bytes);
  }
  if (code == NO_MEMORY) return call_fail(c, FFI_INTERNAL, "no memory for a message of %" PRId64 " bytes", bytes);
  if (code != MPI_SUCCESS) return call_fail_in(c, "MPI_Mrecv", code);
  if (label == expected) return NULL;
  return call_fail(
      c, FFI_FAILED_PRECONDITION,
      "rank %d has sent something else (%" PRId64 " bytes, where %" PRId64
      " of this call were expected). All ranks must make the same calls in the same order: with arrays of the same "
      "dtypes, of one and the same global shape each, and the same arguments. JAXMPI_CHECK=1 tells where "
      "they differ, before anything is sent",
      peer->rank, bytes, peer->bytes);
}

/* What the plan says. */
static ffi_error *by_plan(struct call *c) {
  MPI_Comm comm = (MPI_Comm)c->comm->handle;
  const struct plan *plan = plan_of(c);
  PASS(plan_check(c, plan));
  BEGIN(c, Isend, "to %d ranks and from %d with", plan->send_count, plan->receive_count);
  uint64_t label = plan_label(c, plan, atomic_fetch_add(&c->comm->planned, 1) + 1);
  size_t stage_bytes = (size_t)(plan->sent + plan->received);
  size_t own_bytes = c->messages == NULL ? stage_bytes : 0;
  struct scratch *scratch = scratch_take(own_bytes + (size_t)plan->send_count * sizeof(MPI_Request));
  if (scratch == NULL) return call_fail(c, FFI_INTERNAL, "no memory for messages of %zu bytes", stage_bytes);
  char *stage = c->messages == NULL ? scratch->data : c->messages;
  MPI_Request *requests = (MPI_Request *)(void *)(scratch->data + own_bytes);
  if (c->messages == NULL) plan_pack(c, plan, stage);
  for (int i = 0; i < plan->send_count; i++) memcpy(stage + plan->sends[i].stage, &label, LABEL_BYTES);
  int begun = 0, code = MPI_SUCCESS;
  for (; begun < plan->send_count && code == MPI_SUCCESS; begun++) {
    const struct peer *peer = &plan->sends[begun];
    struct span span = span_of_bytes(peer->bytes);
    code = span.code;
    if (code == MPI_SUCCESS)
      code = mpi.Isend(stage + peer->stage, span.count, span.type, peer->rank, plan->tag, comm, &requests[begun]);
    span_free(&span);
  }
  if (code != MPI_SUCCESS) begun--;
  c->sending = begun > 0;
  ffi_error *error = code == MPI_SUCCESS ? NULL : call_fail_mpi(c, code);
  /* All of them, so that none is left to the next call; but where this rank could not send, others may not have been
   * able to either, and nothing may come. */
  for (int i = 0; i < plan->receive_count && code == MPI_SUCCESS; i++) {
    ffi_error *failure = receive_planned(c, plan, &plan->receives[i], stage, label);
    if (error == NULL) error = failure;
  }
  c->sending = false;
  for (int i = 0; i < begun; i++) {
    MPI_Status sent;
    code = mpi.Wait(&requests[i], &sent);
    if (code != MPI_SUCCESS && error == NULL) error = call_fail_in(c, "MPI_Wait", code);
  }
  if (error == NULL && c->messages == NULL) plan_unpack(c, plan, stage);
  scratch_give(scratch);
  return error;
}

static ffi_error *exchange(struct call *c) { return by_plan(c); }
static ffi_error *neighbor_allgather(struct call *c) { return by_plan(c); }
static ffi_error *neighbor_alltoall(struct call *c) { return by_plan(c); }

int post_send(const struct call *call, intptr_t *request) {
  ARGUMENTS(send, (struct call *)(uintptr_t)call);
  MPI_Request made;
  struct span in = span_of(b.in->type, b.in->count);
  int code = in.code;
  if (code == MPI_SUCCESS) code = mpi.Isend(b.in->data, in.count, in.type, (int)a.dest, (int)a.tag, comm, &made);
  span_free(&in);
  if (code == MPI_SUCCESS) *request = (intptr_t)made;
  return code;
}

/* Until a message has left its buffer. */
static ffi_error *complete(struct call *c) {
  ARGUMENTS(complete, c);
  (void)b, (void)comm;
  MPI_Request request = (MPI_Request) * (intptr_t *)object_of(a.request);
  MPI_Status status;
  BEGIN(c, Wait, "-> %d with", (int)a.dest);
  TRY(c, mpi.Wait(&request, &status));
  return NULL;
}

#ifdef MORE_BODIES
#include MORE_BODIES
#endif

ffi_error *(*const operation_bodies[])(struct call *) = {
#define OPERATION(name, divisibility, buffers, attributes) name,
#include "core/ops.def"
#undef OPERATION
};
