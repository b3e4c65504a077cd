/* An MPI library that accepts pointers to the fake driver's device memory: put in front of a real one by LD_PRELOAD.
 *
 * Before it accesses a buffer it queries the driver about it, as real libraries do; so a call of MPI where the driver
 * must not be called shows as a failure. Without the driver all calls are passed on unchanged. With FAKE_AWARE=0 in the
 * environment it reports that it is not aware. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "fake_driver.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct fake_driver *control_function(void);
typedef int attribute_function(void *value, int attribute, unsigned long long pointer);

static atomic_int translated;

/* Buffers that lay on the device so far. */
EXPORT int aware_translated(void);
EXPORT int aware_translated(void) { return translated; }

/* Where MPI finds the content. Looked up each time, as the driver may be loaded at any time. */
static void *reach(const void *buffer) {
  enum { MEMORY_TYPE = 2 };
  void *same = (void *)(uintptr_t)buffer;
  control_function *control;
  attribute_function *attribute;
  *(void **)&control = dlsym(RTLD_DEFAULT, "fake_driver");
  *(void **)&attribute = dlsym(RTLD_DEFAULT, "cuPointerGetAttribute");
  if (control == NULL || buffer == NULL || buffer == MPI_IN_PLACE || buffer == MPI_BOTTOM) return same;
  unsigned type = 0;
  if (attribute != NULL) attribute(&type, MEMORY_TYPE, (uintptr_t)buffer);
  void *found = control()->reach(buffer);
  if (found != same) translated++;
  return found;
}

#define PASS_ON(name, parameters, ...) \
  EXPORT int MPI_##name parameters { return PMPI_##name(__VA_ARGS__); }
PASS_ON(Allgather, (const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, MPI_Comm comm), reach(in),
        n, t, reach(out), m, u, comm)
PASS_ON(Allreduce, (const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm), reach(in), reach(out),
        n, t, op, comm)
PASS_ON(Alltoall, (const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, MPI_Comm comm), reach(in),
        n, t, reach(out), m, u, comm)
PASS_ON(Bcast, (void *buffer, int n, MPI_Datatype t, int root, MPI_Comm comm), reach(buffer), n, t, root, comm)
PASS_ON(Gather, (const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, int root, MPI_Comm comm),
        reach(in), n, t, reach(out), m, u, root, comm)
PASS_ON(Isend, (const void *in, int n, MPI_Datatype t, int dest, int tag, MPI_Comm comm, MPI_Request *request),
        reach(in), n, t, dest, tag, comm, request)
PASS_ON(Mrecv, (void *out, int n, MPI_Datatype t, MPI_Message *message, MPI_Status *status), reach(out), n, t, message,
        status)
PASS_ON(Reduce, (const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm comm), reach(in),
        reach(out), n, t, op, root, comm)
PASS_ON(Scan, (const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm), reach(in), reach(out), n, t,
        op, comm)
PASS_ON(Scatter, (const void *in, int n, MPI_Datatype t, void *out, int m, MPI_Datatype u, int root, MPI_Comm comm),
        reach(in), n, t, reach(out), m, u, root, comm)
PASS_ON(Send, (const void *in, int n, MPI_Datatype t, int dest, int tag, MPI_Comm comm), reach(in), n, t, dest, tag,
        comm)
PASS_ON(Allgatherv,
        (const void *in, int n, MPI_Datatype t, void *out, const int counts[], const int offsets[], MPI_Datatype u,
         MPI_Comm comm),
        reach(in), n, t, reach(out), counts, offsets, u, comm)
PASS_ON(Alltoallv,
        (const void *in, const int sent[], const int from[], MPI_Datatype t, void *out, const int received[],
         const int to[], MPI_Datatype u, MPI_Comm comm),
        reach(in), sent, from, t, reach(out), received, to, u, comm)
PASS_ON(Exscan, (const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm), reach(in), reach(out), n,
        t, op, comm)
PASS_ON(Gatherv,
        (const void *in, int n, MPI_Datatype t, void *out, const int counts[], const int offsets[], MPI_Datatype u,
         int root, MPI_Comm comm),
        reach(in), n, t, reach(out), counts, offsets, u, root, comm)
PASS_ON(Reduce_scatter, (const void *in, void *out, const int counts[], MPI_Datatype t, MPI_Op op, MPI_Comm comm),
        reach(in), reach(out), counts, t, op, comm)
PASS_ON(Reduce_scatter_block, (const void *in, void *out, int n, MPI_Datatype t, MPI_Op op, MPI_Comm comm), reach(in),
        reach(out), n, t, op, comm)
PASS_ON(Scatterv,
        (const void *in, const int counts[], const int offsets[], MPI_Datatype t, void *out, int m, MPI_Datatype u,
         int root, MPI_Comm comm),
        reach(in), counts, offsets, t, reach(out), m, u, root, comm)

/* As Open MPI's mpi-ext.h and MPICH's mpi.h declare them. */
EXPORT int MPIX_Query_cuda_support(void);
EXPORT int MPIX_Query_rocm_support(void);
EXPORT int MPIX_GPU_query_support(int type, int *is);

static int supported(void) {
  const char *wanted = getenv("FAKE_AWARE");
  return wanted == NULL || strcmp(wanted, "0") != 0;
}

EXPORT int MPIX_Query_cuda_support(void) { return supported(); }
EXPORT int MPIX_Query_rocm_support(void) { return supported(); }

EXPORT int MPIX_GPU_query_support(int type, int *is) {
  enum { CUDA = 0, HIP = 2 };
  *is = (type == CUDA || type == HIP) && supported();
  return MPI_SUCCESS;
}
