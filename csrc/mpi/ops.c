/* The bodies of the collectives and of what communicates nothing. Compiled once per ABI. */
#include "mpi/bodies.h"

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

/* A rank that passes less than others expect leaves the end of its part as it was, and MPI need not notice. So the end
 * of each part, of which there are `parts`, is marked before the call, with a number that no data is likely to have. */
static const uint64_t MARK = UINT64_C(0xd3b7c5915ae2f04b);

static inline bool has_marks(const struct call *c, const struct buffer *out, int parts) {
  return c->memory->host && !runtime.unmarked && buffer_bytes(out) >= (size_t)parts * sizeof MARK;
}

static inline char *mark_of(const struct buffer *out, int parts, int part) {
  size_t bytes = buffer_bytes(out) / (size_t)parts;
  return (char *)out->data + (size_t)(part + 1) * bytes - sizeof MARK;
}

static inline void mark_parts(const struct call *c, const struct buffer *out, int parts) {
  if (!has_marks(c, out, parts)) return;
  for (int i = 0; i < parts; i++) memcpy(mark_of(out, parts, i), &MARK, sizeof MARK);
}

/* The error for a part whose mark is still there. `from`: the rank that it comes from, if it is the first part. */
static inline ffi_error *check_marks(const struct call *c, const struct buffer *out, int parts, int from) {
  if (!has_marks(c, out, parts)) return NULL;
  for (int i = 0; i < parts; i++)
    if (memcmp(mark_of(out, parts, i), &MARK, sizeof MARK) == 0)
      return call_fail(c, FFI_FAILED_PRECONDITION,
                       "rank %d has passed fewer than the %" PRId64
                       " %s that this rank expects of it%s. "
                       "JAXMPI_CHECK=1 compares before anything is sent, and says what each rank does",
                       from + i, out->count / parts, out->type->name,
                       c->operation->divisibility == SCATTERS
                           ? ": root alone passes the whole array, the others a template of one part, such as x[0]"
                           : "");
  return NULL;
}

ffi_error *BODY(after)(struct call *c) {
  (void)c;
  return NULL;
}

/* in: (*shape)  out: (size, *shape) */
ffi_error *BODY(allgather)(struct call *c) {
  ARGUMENTS(allgather, c);
  BEGIN(c, Allgather, "with %" PRId64 " items and", b.in->count);
  struct span s = span_of(b.in->type, b.in->count);
  mark_parts(c, b.out, c->comm->size);
  TRY_SPAN(c, s, mpi.Allgather(b.in->data, s.count, s.type, b.out->data, s.count, s.type, comm));
  return check_marks(c, b.out, c->comm->size, 0);
}

/* in, out: (*shape), may be aliased */
ffi_error *BODY(allreduce)(struct call *c) {
  ARGUMENTS(allreduce, c);
  BEGIN(c, Allreduce, "with %" PRId64 " items and", b.in->count);
  int64_t most = most_at_a_time(c, b.in);
  FOR_CHUNKS_OF(most, b.in->count, i, n)
  TRY(c,
      mpi.Allreduce(chunk_of(b.in, b.out, i), buffer_at(b.out, i), (int)n, element(b.in->type), handle_of(a.op), comm));
  return NULL;
}

/* in, out: (size, *shape) */
ffi_error *BODY(alltoall)(struct call *c) {
  ARGUMENTS(alltoall, c);
  BEGIN(c, Alltoall, "with %" PRId64 " items and", b.in->count);
  struct span s = span_of(b.in->type, b.in->count / c->comm->size);
  mark_parts(c, b.out, c->comm->size);
  TRY_SPAN(c, s, mpi.Alltoall(b.in->data, s.count, s.type, b.out->data, s.count, s.type, comm));
  return check_marks(c, b.out, c->comm->size, 0);
}

ffi_error *BODY(barrier)(struct call *c) {
  ARGUMENTS(barrier, c);
  BEGIN(c, Barrier, "with");
  TRY(c, mpi.Barrier(comm));
  return NULL;
}

/* root: in (*shape), which MPI only reads, and out, which is absent or may be aliased with in  others: out (*shape) */
ffi_error *BODY(bcast)(struct call *c) {
  ARGUMENTS(bcast, c);
  bool root = c->comm->rank == a.root;
  const struct buffer *data = root ? b.in : b.out;
  NEEDS(c, data);
  BEGIN(c, Bcast, "from %d with %" PRId64 " items and", (int)a.root, data->count);
  if (root && b.out->count > 0 && b.out->data != b.in->data)
    PASS(call_move(c, b.out->data, b.in->data, buffer_bytes(b.in)));
  struct span s = span_of(data->type, data->count);
  if (!root) mark_parts(c, b.out, 1);
  TRY_SPAN(c, s, mpi.Bcast(data->data, s.count, s.type, (int)a.root, comm));
  return root ? NULL : check_marks(c, b.out, 1, (int)a.root);
}

/* found: truth values. If one is true, the error has the text `text`. Communicates nothing. */
ffi_error *BODY(check)(struct call *c) {
  ARGUMENTS(check, c);
  for (const struct buffer *found = b.found; found < &c->buffers[c->buffer_count]; found++)
    for (int64_t i = 0; i < found->count; i++)
      if (((const bool *)found->data)[i])
        return call_fail(c, FFI_FAILED_PRECONDITION, "%s", (const char *)object_of(a.text));
  return NULL;
}

/* Makes the communicator of a group. All ranks of the group do this, and no others. */
ffi_error *BODY(connect)(struct call *c) {
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
ffi_error *BODY(exscan)(struct call *c) {
  ARGUMENTS(exscan, c);
  BEGIN(c, Exscan, "with %" PRId64 " items and", b.in->count);
  FOR_CHUNKS(c, b.in->count, i, n)
  TRY(c, mpi.Exscan(chunk_of(b.in, b.out, i), buffer_at(b.out, i), (int)n, element(b.in->type), handle_of(a.op), comm));
  return c->comm->rank > 0 ? NULL : call_zero(c, b.out->data, buffer_bytes(b.out));
}

/* in: (*shape)  out, on root only: (size, *shape) */
ffi_error *BODY(gather)(struct call *c) {
  ARGUMENTS(gather, c);
  if (c->comm->rank == a.root) NEEDS(c, b.out);
  BEGIN(c, Gather, "-> %d with %" PRId64 " items and", (int)a.root, b.in->count);
  struct span s = span_of(b.in->type, b.in->count);
  if (c->comm->rank == a.root) mark_parts(c, b.out, c->comm->size);
  TRY_SPAN(c, s, mpi.Gather(b.in->data, s.count, s.type, b.out->data, s.count, s.type, (int)a.root, comm));
  return c->comm->rank == a.root ? check_marks(c, b.out, c->comm->size, 0) : NULL;
}

/* in: (*shape)  out, on root only: (*shape), may be aliased */
ffi_error *BODY(reduce)(struct call *c) {
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
ffi_error *BODY(reduce_scatter)(struct call *c) {
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
ffi_error *BODY(scan)(struct call *c) {
  ARGUMENTS(scan, c);
  BEGIN(c, Scan, "with %" PRId64 " items and", b.in->count);
  FOR_CHUNKS(c, b.in->count, i, n)
  TRY(c, mpi.Scan(chunk_of(b.in, b.out, i), buffer_at(b.out, i), (int)n, element(b.in->type), handle_of(a.op), comm));
  return NULL;
}

/* in, on root only: (size, *shape)  out: (*shape) */
ffi_error *BODY(scatter)(struct call *c) {
  ARGUMENTS(scatter, c);
  if (c->comm->rank == a.root) NEEDS(c, b.in);
  BEGIN(c, Scatter, "from %d with %" PRId64 " items and", (int)a.root, b.out->count);
  struct span s = span_of(b.out->type, b.out->count);
  mark_parts(c, b.out, 1);
  TRY_SPAN(c, s, mpi.Scatter(b.in->data, s.count, s.type, b.out->data, s.count, s.type, (int)a.root, comm));
  return check_marks(c, b.out, 1, (int)a.root);
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
  int64_t rest = out->count - landing->elements;
  if (rest < 0) {
    return call_fail_dropped(c, out,
                             "rows sent to this rank: %" PRId64 "; its result has room for %" PRId64
                             ", so nothing was written. Make room with a larger rows=",
                             landing->elements / row, out->count / row);
  }
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
    code = mpi.Gatherv(b.in->data, parts.counts[c->comm->rank], parts.type, to.data, parts.counts, parts.offsets,
                       parts.type, (int)a.root, comm);
  parts_free(&parts);
  if (error == NULL && root) return landed(c, b.out, a.row, &to, code);
  if (error == NULL) TRY(c, code);
  return error;
}

/* in: at least the rows of all ranks  out: at least those of this rank */
ffi_error *BODY(reduce_scatterv)(struct call *c) {
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
ffi_error *BODY(scatterv)(struct call *c) {
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

#ifdef MORE_BODIES
#include MORE_BODIES
#endif

ffi_error *(*const operation_bodies[])(struct call *) = {
#define OPERATION(name, divisibility, buffers, attributes) BODY(name),
#include "core/ops.def"
#undef OPERATION
};
