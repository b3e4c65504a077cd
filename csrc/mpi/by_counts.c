/* The bodies of collectives that divide arrays along the first axis by counts of rows. Compiled once per ABI. */

#include "mpi/bodies.h"

/* The parts of an array, one for each rank, one behind the other. The ranks have exchanged the counts. A negative
 * count, with no rows, says that a rank cannot do its part. All ranks still make the same calls of MPI. */
struct parts {
  int64_t elements;      /* of all parts */
  int *counts, *offsets; /* of each part, in units of `type` */
  MPI_Datatype type;     /* an element; a row, if an int cannot count the elements */
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

/* Addresses for arrays of no elements. XLA may put such an array at the address of another one, and MPI may refuse to
 * read and write at one address. */
static char nothing[2];

static const void *rows_in(const struct buffer *in) { return in->count > 0 ? in->data : &nothing[0]; }
static void *rows_out(const struct buffer *out) { return out->count > 0 ? out->data : &nothing[1]; }

/* Where `elements` are received: in `out`, or, if they do not fit, in host memory, because the other ranks send them
 * in any case. */
struct landing {
  void *data, *own;
  int64_t elements;
};

static ffi_error *landing_make(const struct call *c, const struct buffer *out, int64_t elements,
                               struct landing *landing) {
  *landing = (struct landing){rows_out(out), NULL, elements};
  if (elements <= out->count) return NULL;
  landing->data = landing->own = malloc((size_t)elements * out->type->bytes);
  if (landing->own == NULL)
    return call_fail(c, FFI_INTERNAL, "no memory for the %" PRId64 " elements that have been sent", elements);
  return NULL;
}

/* End a landing after the calls of MPI, the last of which returned `code`. Fill the rest of the result with zeros. */
static ffi_error *landing_end(struct call *c, const struct buffer *out, int64_t row, struct landing *landing,
                              int code) {
  free(landing->own);
  TRY(c, code);
  int64_t rest = out->count - landing->elements;
  if (rest < 0) {
    return call_fail_dropped(c, out,
                             "rows sent to this rank: %" PRId64 "; its result has room for %" PRId64
                             ", so nothing was written. Make room with a larger rows=",
                             landing->elements / row, out->count / row);
  }
  return rest > 0 ? call_zero(c, buffer_at(out, landing->elements), (size_t)rest * out->type->bytes) : NULL;
}

/* Check the counts of rows that this rank passes to MPI. Python has compared them with the array. */
static ffi_error *check_rows(const struct call *c, const struct buffer *in, int64_t elements) {
  if (elements <= in->count) return NULL;
  return call_fail(c, FFI_INTERNAL, "counts of %" PRId64 " elements of an array of %" PRId64 ": reinstall jaxmpi",
                   elements, in->count);
}

/* Return the error for a negative count, which `rank` has sent. */
static ffi_error *fail_counts(const struct call *c, int rank, int64_t count) {
  const char *self = rank == c->comm->rank ? " (this one)" : "";
  if (count == NO_SUCH_RANK)
    return call_fail(c, FFI_INVALID_ARGUMENT,
                     "rank %d%s has passed a new owner of a row that is neither a rank, 0 to %d, nor -1, which is "
                     "nobody: nothing was received from it",
                     rank, self, c->comm->size - 1);
  if (count == OTHER_ARRAYS)
    return call_fail(c, FFI_INVALID_ARGUMENT,
                     "rank %d%s has passed other arrays than this rank: shapes of rows, dtypes, names or the order "
                     "differ. Nothing was sent to it or received from it",
                     rank, self);
  if (c->operation->row == ROW_reduce_scatterv)
    return call_fail(c, FFI_INVALID_ARGUMENT,
                     "a rank has passed a count of rows that is negative, or the counts of all ranks together are more "
                     "than the rows of the array: nothing was reduced");
  return call_fail(c, FFI_INVALID_ARGUMENT,
                   "rank %d%s has passed a count of rows that is negative, or counts that are more than the rows of "
                   "its array: nothing was received from it",
                   rank, self);
}

/* Make parts from counts that all ranks know. So all ranks get the same error. */
static ffi_error *parts_of_all(const struct call *c, const struct buffer *counts, const struct datatype *type,
                               int64_t row, struct parts *parts) {
  PASS(parts_make(c, counts, type, row, parts));
  if (parts->invalid < 0) return NULL;
  parts_free(parts);
  return fail_counts(c, parts->invalid, row_count(counts, parts->invalid));
}

/* in: at least the rows of this rank  out: at least the rows of all ranks */
ffi_error *BODY(allgatherv)(struct call *c) {
  ARGUMENTS(allgatherv, c);
  BEGIN(c, Allgatherv, "with %" PRId64 " items and", b.in->count);
  struct parts parts;
  struct landing to = {NULL, NULL, 0};
  PASS(parts_of_all(c, b.counts, b.in->type, a.row, &parts));
  ffi_error *error = check_rows(c, b.in, row_count(b.counts, c->comm->rank) * a.row);
  int code = MPI_SUCCESS;
  if (error == NULL) error = landing_make(c, b.out, parts.elements, &to);
  if (error == NULL)
    code = mpi.Allgatherv(rows_in(b.in), parts.counts[c->comm->rank], parts.type, to.data, parts.counts, parts.offsets,
                          parts.type, comm);
  parts_free(&parts);
  if (error == NULL) error = landing_end(c, b.out, a.row, &to, code);
  return error;
}

/* With JAXMPI_CHECK: checks that each rank expects what the others send. All ranks come to the same verdict. */
static ffi_error *compare_counts(struct call *c, const struct buffer *sent, const struct buffer *received) {
  MPI_Comm comm = handle_of_comm(c->comm);
  MPI_Datatype type = element(sent->type);
  int size = c->comm->size, wrong = -1, other = -1;
  PASS(check_counts(c, sent));
  PASS(check_counts(c, received));
  int32_t *values = malloc((size_t)size * sizeof *values), wrong_count = 0;
  if (values == NULL) return call_fail(c, FFI_INTERNAL, "no memory to compare the counts");
  int code = mpi.Alltoall(sent->data, 1, type, values, 1, type, comm);
  for (int r = size - 1; code == MPI_SUCCESS && r >= 0; r--)
    if (values[r] != row_count(received, r)) wrong = r, wrong_count = values[r];
  if (code == MPI_SUCCESS) code = mpi.Allgather(&wrong, 1, type, values, 1, type, comm);
  for (int r = size - 1; code == MPI_SUCCESS && r >= 0; r--)
    if (values[r] >= 0) other = r;
  free(values);
  TRY(c, code);
  if (wrong >= 0)
    return call_fail(c, FFI_FAILED_PRECONDITION,
                     "the ranks differ: rank %d sends %d rows to this rank, which expects %d. Nothing was sent", wrong,
                     (int)wrong_count, (int)row_count(received, wrong));
  if (other >= 0)
    return call_fail(c, FFI_FAILED_PRECONDITION,
                     "the ranks differ: rank %d expects other numbers of rows than are sent to it. Nothing was sent",
                     other);
  return NULL;
}

/* in: at least the rows that this rank sends  out: at least the rows that it receives */
ffi_error *BODY(alltoallv)(struct call *c) {
  ARGUMENTS(alltoallv, c);
  BEGIN(c, Alltoallv, "with %" PRId64 " items and", b.in->count);
  struct parts sent, received;
  struct landing to = {NULL, NULL, 0};
  bool check = atomic_load_explicit(&runtime.check, memory_order_relaxed) && c->comm->size > 1;
  if (check) PASS(compare_counts(c, b.sent, b.received));
  PASS(parts_make(c, b.sent, b.in->type, a.row, &sent));
  ffi_error *error = parts_make(c, b.received, b.in->type, a.row, &received);
  if (error != NULL) return parts_free(&sent), error;
  error = check_rows(c, b.in, sent.elements);
  if (error == NULL) error = landing_make(c, b.out, received.elements, &to);
  int code = MPI_SUCCESS;
  if (error == NULL)
    code = mpi.Alltoallv(rows_in(b.in), sent.counts, sent.offsets, sent.type, to.data, received.counts,
                         received.offsets, received.type, comm);
  parts_free(&sent);
  parts_free(&received);
  if (error == NULL) error = landing_end(c, b.out, a.row, &to, code);
  if (error != NULL) return error;
  if (sent.invalid >= 0) return fail_counts(c, c->comm->rank, row_count(b.sent, sent.invalid));
  if (received.invalid >= 0) return fail_counts(c, received.invalid, row_count(b.received, received.invalid));
  return NULL;
}

/* in: at least the rows of this rank  out, on root only: at least the rows of all ranks */
ffi_error *BODY(gatherv)(struct call *c) {
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
    code = mpi.Gatherv(rows_in(b.in), parts.counts[c->comm->rank], parts.type, to.data, parts.counts, parts.offsets,
                       parts.type, (int)a.root, comm);
  parts_free(&parts);
  if (error == NULL && root) return landing_end(c, b.out, a.row, &to, code);
  if (error == NULL) TRY(c, code);
  return error;
}

/* in: at least the rows of all ranks  out: at least the rows of this rank */
ffi_error *BODY(reduce_scatterv)(struct call *c) {
  ARGUMENTS(reduce_scatterv, c);
  BEGIN(c, Reduce_scatter, "with %" PRId64 " items and", b.in->count);
  struct parts parts;
  struct landing to = {NULL, NULL, 0};
  int rank = c->comm->rank, code = MPI_SUCCESS;
  PASS(parts_of_all(c, b.counts, b.in->type, a.row, &parts));
  ffi_error *error = check_rows(c, b.in, parts.elements);
  if (error == NULL) error = landing_make(c, b.out, row_count(b.counts, rank) * a.row, &to);
  if (error == NULL && parts.row.derived) { /* no reduction takes a type of rows */
    int64_t first = 0;
    for (int r = 0; r < c->comm->size && error == NULL; r++) {
      int64_t elements = row_count(b.counts, r) * a.row;
      error = reduce_to(c, r, b.in, first, elements, to.data, handle_of(a.op));
      first += elements;
    }
    if (error != NULL) free(to.own);
  } else if (error == NULL) {
    code = mpi.Reduce_scatter(rows_in(b.in), to.data, parts.counts, parts.type, handle_of(a.op), comm);
  }
  parts_free(&parts);
  if (error == NULL) error = landing_end(c, b.out, a.row, &to, code);
  return error;
}

/* in, on root only: at least the rows of all ranks  out: at least the rows of this rank */
ffi_error *BODY(scatterv)(struct call *c) {
  ARGUMENTS(scatterv, c);
  int rank = c->comm->rank;
  if (rank == a.root) NEEDS(c, b.in);
  BEGIN(c, Scatterv, "from %d with %" PRId64 " items and", (int)a.root, b.out->count);
  struct parts parts;
  struct landing to = {NULL, NULL, 0};
  PASS(parts_make(c, b.counts, b.out->type, a.row, &parts));
  if (parts.invalid >= 0) return parts_free(&parts), fail_counts(c, (int)a.root, row_count(b.counts, parts.invalid));
  ffi_error *error = rank == a.root ? check_rows(c, b.in, parts.elements) : NULL;
  int code = MPI_SUCCESS;
  if (error == NULL) error = landing_make(c, b.out, row_count(b.counts, rank) * a.row, &to);
  if (error == NULL)
    code = mpi.Scatterv(rows_in(b.in), parts.counts, parts.offsets, parts.type, to.data, parts.counts[rank], parts.type,
                        (int)a.root, comm);
  parts_free(&parts);
  if (error == NULL) error = landing_end(c, b.out, a.row, &to, code);
  return error;
}
