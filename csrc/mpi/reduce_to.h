/* Reductions of a part of a vector to one rank. Reductions that are too long for MPI are put together from them.
 * Threads: those that call bodies; no lock is taken. */
#ifndef JAXMPI_REDUCE_TO_H
#define JAXMPI_REDUCE_TO_H

#include "mpi/bodies.h"

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

#endif
