/* The floor of the benchmark: what the other contenders do, in plain C.
 *
 * Each function repeats `calls` times: one operation on the n floats at x, then x = factor * result. `y` has room for
 * size * n floats. Compiled by the environment's mpicc, called from Python.
 */
#include <mpi.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Memory as a C program has it: NumPy's is in huge pages. */
float *buffer(size_t n) { return aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64); }
void release(float *x) { free(x); }

static void scale(float *restrict x, const float *restrict y, size_t n, float factor) {
  for (size_t i = 0; i < n; i++) x[i] = factor * y[i];
}

static void scale_in_place(float *x, size_t n, float factor) {
  for (size_t i = 0; i < n; i++) x[i] *= factor;
}

#define LOOP(name, ...)                                                                   \
  void name(MPI_Comm *communicator, float *x, float *y, int n, float factor, int calls) { \
    MPI_Comm comm = *communicator;                                                        \
    int rank, size;                                                                       \
    MPI_Comm_rank(comm, &rank);                                                           \
    MPI_Comm_size(comm, &size);                                                           \
    int left = (rank + size - 1) % size, right = (rank + 1) % size;                       \
    size_t m = (size_t)n;                                                                 \
    (void)y, (void)left, (void)right;                                                     \
    for (int call = 0; call < calls; call++) {                                            \
      __VA_ARGS__;                                                                        \
    }                                                                                     \
  }

LOOP(allreduce, MPI_Allreduce(x, y, n, MPI_FLOAT, MPI_SUM, comm); scale(x, y, m, factor))

LOOP(allreduce_in_place, MPI_Allreduce(MPI_IN_PLACE, x, n, MPI_FLOAT, MPI_SUM, comm); scale_in_place(x, m, factor))

LOOP(sendrecv, MPI_Sendrecv(x, n, MPI_FLOAT, right, 0, y, n, MPI_FLOAT, left, 0, comm, MPI_STATUS_IGNORE);
     scale(x, y, m, factor))

static void send_and_answer(MPI_Comm comm, int rank, const float *x, float *y, int n) {
  if (rank == 0) {
    MPI_Send(x, n, MPI_FLOAT, 1, 0, comm);
    MPI_Recv(y, n, MPI_FLOAT, 1, 0, comm, MPI_STATUS_IGNORE);
  } else if (rank == 1) {
    MPI_Recv(y, n, MPI_FLOAT, 0, 0, comm, MPI_STATUS_IGNORE);
    MPI_Send(y, n, MPI_FLOAT, 0, 0, comm);
  } else {
    memcpy(y, x, (size_t)n * sizeof(float)); /* takes no part, and keeps what it has */
  }
}

LOOP(pingpong, send_and_answer(comm, rank, x, y, n); scale(x, y, m, factor))

LOOP(bcast, MPI_Bcast(x, n, MPI_FLOAT, 0, comm); scale_in_place(x, m, factor))

LOOP(allgather, MPI_Allgather(x, n, MPI_FLOAT, y, n, MPI_FLOAT, comm); scale(x, y + (size_t)right * m, m, factor))

LOOP(alltoall, MPI_Alltoall(x, n, MPI_FLOAT, y, n, MPI_FLOAT, comm); scale(x, y, (size_t)size *m, factor))

/* Of a part for each rank, all of the same length. */
static void alltoallv_of(MPI_Comm comm, int size, const float *x, float *y, int n) {
  int counts[size], offsets[size];
  for (int r = 0; r < size; r++) counts[r] = n, offsets[r] = r * n;
  MPI_Alltoallv(x, counts, offsets, MPI_FLOAT, y, counts, offsets, MPI_FLOAT, comm);
}

LOOP(alltoallv, alltoallv_of(comm, size, x, y, n); scale(x, y, (size_t)size *m, factor))

LOOP(barrier, MPI_Barrier(comm); scale_in_place(x, m, factor))
