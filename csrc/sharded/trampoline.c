/* MPItrampoline's side of MPI (its ABI, version 2.9), which jaxlib's "mpi" collectives call.
 *
 * When jaxlib is loaded, it looks up all names in the library that MPITRAMPOLINE_LIB names, and ends the process if one
 * is missing. It copies the constants. MPI itself comes later, with mpi4py. So the handles here are our own numbers,
 * and addresses of our objects. XLA uses the names below; names.def has the others.
 *
 * Threads: those that execute XLA's programs, without the GIL, and Python's when it makes a client. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sharded/sharded.h"

#define EXPORT __attribute__((visibility("default")))

typedef uintptr_t handle;

/* Predefined handles: datatypes by XLA's codes, of which MPItrampoline has a few, then reductions. */
enum { NO_COMM = 1, WORLD = 2, TYPES = 100, REDUCTIONS = 200 };
enum { SUM, PROD, MAX, MIN };

#define CONSTANT(name) EXPORT const handle name[2] = {0xdead, 0xdead}; /* an int is as good */
#define FUNCTION(name) \
  EXPORT int name(void) { unexpected(#name); }
static _Noreturn void unexpected(const char *name) {
  fprintf(stderr,
          "jaxmpi: this version of jaxlib calls %s, which jaxmpi does not have for it: use --collectives gloo\n", name);
  fflush(stderr);
  _exit(1);
}
/* clang-format off: one name per line */
#include "sharded/names.def"
/* clang-format on */

EXPORT const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 9, mpiwrapper_version_patch = 0;
EXPORT const int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
EXPORT void mpiwrapper_export_fortran_constants_(void) {}

EXPORT const handle MPIABI_COMM_WORLD = WORLD, MPIABI_STATUS_IGNORE = 0;
EXPORT const int MPIABI_SUCCESS = 0, MPIABI_UNDEFINED = -32766, MPIABI_THREAD_FUNNELED = 1;
EXPORT const handle MPIABI_INT8_T = TYPES + 2, MPIABI_INT16_T = TYPES + 3, MPIABI_INT32_T = TYPES + 4,
                    MPIABI_INT64_T = TYPES + 5, MPIABI_UINT8_T = TYPES + 6, MPIABI_UINT16_T = TYPES + 7,
                    MPIABI_UINT32_T = TYPES + 8, MPIABI_UINT64_T = TYPES + 9, MPIABI_FLOAT = TYPES + 11,
                    MPIABI_DOUBLE = TYPES + 12, MPIABI_C_COMPLEX = TYPES + 15, MPIABI_C_DOUBLE_COMPLEX = TYPES + 18;
EXPORT const handle MPIABI_BYTE = TYPES + 20; /* any code of one byte except UINT8_T's, which must differ */
EXPORT const handle MPIABI_SUM = REDUCTIONS + SUM, MPIABI_PROD = REDUCTIONS + PROD, MPIABI_MAX = REDUCTIONS + MAX,
                    MPIABI_MIN = REDUCTIONS + MIN;

/* Return what MPI functions return: 0, or a number that stands for this thread's last error. */
static int code(const ffi_error *error) { return error == NULL ? 0 : 1; }

/* Return a communicator. XLA does not check whether it got one, so the first use fails. */
static struct communicator *comm_of(handle comm) {
  if (comm == NO_COMM)
    sharded_fail(
        "jaxmpi has no communicator for this program, because it does not know the processes: see "
        "docs/sharded.md");
  return comm == NO_COMM ? NULL : comm == WORLD ? runtime.world : (struct communicator *)comm;
}

static struct reduction *reduction_of(handle op, handle type) {
  handle i = op - REDUCTIONS, code = type - TYPES;
  struct reduction *reduction = i < 4 && code < DTYPE_CODES ? runtime.reductions[code][i] : NULL;
  if (reduction == NULL) sharded_fail("XLA passes a reduction, or a datatype, that jaxmpi does not have for it");
  return reduction;
}

EXPORT int MPIABI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  (void)argc, (void)argv;
  *provided = required;
  return runtime.world != NULL ? 0 : code(sharded_fail("import jaxmpi before JAX makes its devices"));
}

EXPORT int MPIABI_Finalize(void) { return 0; } /* mpi4py's to do */

EXPORT int MPIABI_Error_string(int number, char *text, int *length) {
  (void)number;
  strcpy(text, sharded_error());
  *length = (int)strlen(text);
  return 0;
}

/* XLA lets only one thread make communicators: MPI's first. Here any thread may: see sharded_expect. */
EXPORT int MPIABI_Is_thread_main(int *flag) {
  *flag = 1;
  return 0;
}

EXPORT int MPIABI_Comm_rank(handle comm, int *rank) {
  const struct communicator *target = comm_of(comm);
  *rank = target != NULL ? target->rank : 0;
  return target == NULL;
}

EXPORT int MPIABI_Comm_size(handle comm, int *size) {
  const struct communicator *target = comm_of(comm);
  *size = target != NULL ? target->size : 1;
  return target == NULL;
}

EXPORT int MPIABI_Comm_split(handle comm, int color, int key, handle *result) {
  (void)comm, (void)color;
  struct communicator *target = sharded_expected(key);
  *result = target != NULL ? (handle)target : NO_COMM;
  return 0;
}

/* Called when the process ends, maybe after MPI. */
EXPORT int MPIABI_Comm_free(handle *comm) {
  *comm = NO_COMM;
  return 0;
}

EXPORT int MPIABI_Allreduce(const void *in, void *out, int count, handle type, handle op, handle comm) {
  struct communicator *target = comm_of(comm);
  struct reduction *reduction = reduction_of(op, type);
  if (target == NULL || reduction == NULL) return 1;
  return code(sharded_allreduce(in, out, count, (int)(type - TYPES), reduction, target));
}

EXPORT int MPIABI_Allgather(const void *in, int count, handle type, void *out, int outcount, handle outtype,
                            handle comm) {
  (void)outcount, (void)outtype; /* XLA passes the same */
  struct communicator *target = comm_of(comm);
  return target == NULL ? 1 : code(sharded_allgather(in, count, (int)(type - TYPES), out, target));
}

EXPORT int MPIABI_Reduce_scatter(const void *in, void *out, const int *counts, handle type, handle op, handle comm) {
  struct communicator *target = comm_of(comm);
  struct reduction *reduction = reduction_of(op, type);
  if (target == NULL || reduction == NULL) return 1;
  return code(sharded_reduce_scatter(in, out, counts[0], (int)(type - TYPES), reduction, target)); /* all are equal */
}

EXPORT int MPIABI_Irecv(void *out, int bytes, handle type, int source, int tag, handle comm, handle *request) {
  (void)type, (void)tag; /* MPI_BYTE and 0 */
  struct communicator *target = comm_of(comm);
  *request = 0;
  return target == NULL ? 1 : code(sharded_receive(out, bytes, source, target, (struct message **)(void *)request));
}

EXPORT int MPIABI_Isend(const void *in, int bytes, handle type, int to, int tag, handle comm, handle *request) {
  (void)type, (void)tag;
  struct communicator *target = comm_of(comm);
  *request = 0;
  return target == NULL ? 1 : code(sharded_send(in, bytes, to, target, (struct message **)(void *)request));
}

EXPORT int MPIABI_Wait(handle *request, void *status) {
  (void)status;
  struct message *message = (struct message *)*request;
  *request = 0;
  return message == NULL ? 0 : code(sharded_wait(message));
}

EXPORT int MPIABI_Sendrecv(const void *in, int bytes, handle type, int to, int tag, void *out, int outbytes,
                           handle outtype, int from, int outtag, handle comm, void *status) {
  (void)type, (void)tag, (void)outbytes, (void)outtype, (void)outtag, (void)status;
  struct communicator *target = comm_of(comm);
  return target == NULL ? 1 : code(sharded_exchange(in, bytes, to, out, from, target));
}
