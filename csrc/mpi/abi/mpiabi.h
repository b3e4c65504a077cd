/* The standard ABI of MPI 5 (libmpi_abi.so.1): handles are pointers; predefined ones are small numbers. */
#define ABI_NAME mpiabi

#ifndef MPI_VERSION /* the check program has included the real mpi.h */
typedef struct MPI_ABI_Comm *MPI_Comm;
typedef struct MPI_ABI_Datatype *MPI_Datatype;
typedef struct MPI_ABI_Op *MPI_Op;
typedef struct MPI_ABI_Group *MPI_Group;
typedef struct MPI_ABI_Message *MPI_Message;
typedef struct MPI_ABI_Request *MPI_Request;
typedef intptr_t MPI_Aint;
typedef int64_t MPI_Count;
#define MPI_Status ABI_Status
#endif

typedef struct {
  int MPI_SOURCE;
  int MPI_TAG;
  int MPI_ERROR;
  int internal[5];
} ABI_Status;

#define ABI_IN_PLACE ((void *)1)
enum { ABI_PROC_NULL = -3, ABI_ANY_SOURCE = -1, ABI_ANY_TAG = -2, ABI_UNDEFINED = -32766 };
