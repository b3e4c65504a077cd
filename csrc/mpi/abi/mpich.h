/* MPICH since 3.1 and its family: Intel MPI, MVAPICH, Cray MPICH (libmpi.so.12). Handles are integers. */
#define ABI_NAME mpich

#ifndef MPI_VERSION /* the check program has included the real mpi.h */
typedef int MPI_Comm;
typedef int MPI_Datatype;
typedef int MPI_Op;
typedef int MPI_Group;
typedef int MPI_Message;
typedef int MPI_Request;
typedef intptr_t MPI_Aint;
typedef long long MPI_Count;
#define MPI_Status ABI_Status
#endif

typedef struct {
  int count_low;
  int count_high_and_cancelled;
  int MPI_SOURCE;
  int MPI_TAG;
  int MPI_ERROR;
} ABI_Status;

#define ABI_IN_PLACE ((void *)-1)
enum { ABI_PROC_NULL = -1, ABI_ANY_SOURCE = -2, ABI_ANY_TAG = -1, ABI_UNDEFINED = -32766 };
