/* The bodies of the collectives and of operations that do not communicate. Compiled once per ABI. */
#include "mpi/bodies.h"

/* How many elements of an allreduce MPI gets at a time. For each call, the libraries take memory as long as the vector.
 * From some length on this is fresh memory of the system, which costs more than the sum. */
static inline int64_t most_at_a_time(const struct call *c, const struct buffer *in) {
  int64_t piece = c->comm->piece;
  if (piece == 0 || (int64_t)buffer_bytes(in) < PIECES * piece) return runtime.max_count;
  int64_t most = piece / (int64_t)in->type->bytes;
  return most < runtime.max_count ? most : runtime.max_count;
}

/* The operand's chunk, or MPI_IN_PLACE if the result aliases the operand. XLA decides about aliasing on each rank
 * alone. For an allreduce the standard requires MPI_IN_PLACE on all ranks or on none, but no library passes this choice
 * to other ranks. */
static inline const void *chunk_of(const struct buffer *in, const struct buffer *out, int64_t first) {
  return in->data == out->data ? ABI_IN_PLACE : buffer_at(in, first);
}

/* If a rank passes less than others expect, the end of the part stays as it was, and MPI need not notice. So the end
 * of each of the `parts` is marked before the call, with a number that no data is likely to have. */
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

/* Return the error for a part whose mark is still there. `from`: the rank that the first part comes from. */
static inline ffi_error *check_marks(const struct call *c, const struct buffer *out, int parts, int from) {
  if (!has_marks(c, out, parts)) return NULL;
  for (int i = 0; i < parts; i++)
    if (memcmp(mark_of(out, parts, i), &MARK, sizeof MARK) == 0)
      return call_fail(c, FFI_FAILED_PRECONDITION,
                       "rank %d has passed fewer than the %" PRId64
                       " %s that this rank expects of it%s. "
                       "JAXMPI_CHECK=1 compares before anything is sent, and says what each rank does",
                       from + i, out->count / parts, out->type->name,
                       c->operation->divisibility == DIVIDE_SCATTERS
                           ? ": root alone passes the whole array, the others a template of one part, such as x[0]"
                           : "");
  return NULL;
}

ffi_error *BODY(after)(struct call *c) {
  (void)c;
  return NULL;
}

ffi_error *BODY(done)(struct call *c) { return BODY(after)(c); }

ffi_error *BODY(outside)(struct call *c) { return call_fail(c, FFI_INTERNAL, "no program calls it: reinstall jaxmpi"); }

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
  struct span s = span_of(data->type, data->count);
  if (!root) mark_parts(c, b.out, 1);
  TRY_SPAN(c, s, mpi.Bcast(data->data, s.count, s.type, (int)a.root, comm));
  if (!root) return check_marks(c, b.out, 1, (int)a.root);
  if (b.out->count == 0 || b.out->data == b.in->data) return NULL;
  return call_move(c, b.out->data, b.in->data, buffer_bytes(b.in)); /* after Bcast, so that no rank waits for it */
}

/* differs: truth values. If one is true, the body fails with the text `text`. Communicates nothing. */
ffi_error *BODY(check)(struct call *c) {
  ARGUMENTS(check, c);
  for (const struct buffer *flags = b.differs; flags < &c->buffers[c->buffer_count]; flags++)
    for (int64_t i = 0; i < flags->count; i++)
      if (((const bool *)flags->data)[i])
        return call_fail(c, FFI_FAILED_PRECONDITION, "%s", (const char *)object_of(a.text));
  return NULL;
}

/* Make the communicator of a group. All ranks of the group do this, and no others. */
ffi_error *BODY(connect)(struct call *c) {
  ARGUMENTS(connect, c);
  (void)b;
  struct group *g = object_of(a.group);
  MPI_Group world, group;
  MPI_Comm group_comm;
  BEGIN(c, Comm_create_group, "of %d ranks with", g->size);
  TRY_MPI(c, Comm_group, comm, &world);
  int code = mpi.Group_incl(world, g->size, g->ranks, &group);
  mpi.Group_free(&world);
  TRY(c, code);
  code = mpi.Comm_create_group(comm, group, 0, &group_comm);
  mpi.Group_free(&group);
  TRY(c, code);
  g->handle = (intptr_t)group_comm;
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

#ifdef MORE_BODIES
#include MORE_BODIES
#endif
