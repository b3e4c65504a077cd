/* Open MPI 4 and 5 (libmpi.so.40): handles are pointers to the library's own structures. */
#define ABI_NAME openmpi

#ifndef MPI_VERSION /* the check program has included the real mpi.h */
typedef struct ompi_communicator_t *MPI_Comm;
typedef struct ompi_datatype_t *MPI_Datatype;
typedef struct ompi_op_t *MPI_Op;
typedef struct ompi_group_t *MPI_Group;
typedef struct ompi_message_t *MPI_Message;
typedef struct ompi_request_t *MPI_Request;
typedef intptr_t MPI_Aint;
typedef long long MPI_Count;
#define MPI_Status ABI_Status
#endif

typedef struct {
  int MPI_SOURCE;
  int MPI_TAG;
  int MPI_ERROR;
  int cancelled;
  size_t bytes;
} ABI_Status;

#define ABI_IN_PLACE ((void *)1)
enum { ABI_PROC_NULL = -2, ABI_ANY_SOURCE = -1, ABI_ANY_TAG = -1, ABI_UNDEFINED = -32766 };
