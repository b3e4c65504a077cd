/* The exchange and the computation of overlap.py in C: see there. */
#include <mpi.h>
#include <string.h>

/* As long as one of XLA's loops over this many elements. */
static void compute(float *x, int elements, int steps) {
  for (int s = 0; s < steps; s++)
    for (int i = 0; i < elements; i++) x[i] = x[i] * 0.999f + 0.001f;
}

static void exchange_start(const float *in, float *out, int count, int left, int right, MPI_Comm comm,
                           MPI_Request requests[2]) {
  MPI_Irecv(out, count, MPI_FLOAT, left, 0, comm, &requests[0]);
  MPI_Isend(in, count, MPI_FLOAT, right, 0, comm, &requests[1]);
}

/* `kind`: 0 the exchange alone, 1 the computation alone, 2 one after the other, 3 overlapped. */
void run(int kind, int calls, const float *in, float *out, float *x, int count, int elements, int steps, int left,
         int right, int handle) {
  MPI_Comm comm = MPI_Comm_f2c(handle);
  MPI_Request requests[2];
  for (int i = 0; i < calls; i++) {
    if (kind != 1) exchange_start(in, out, count, left, right, comm, requests);
    if (kind == 0 || kind == 2) MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    if (kind != 0) compute(x, elements, steps);
    if (kind == 3) MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  }
}
