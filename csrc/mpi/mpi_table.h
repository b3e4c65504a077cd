/* The MPI library in one ABI: its types, its constants, its functions.
 *
 * Included only by the sources that are compiled once per ABI, with ABI_HEADER naming the header in mpi/abi/. No mpi.h
 * is used: the library is the one that mpi4py has loaded, and its functions are looked up by name.
 *
 * Threads: `mpi` is filled once, at import under the GIL, then read by all threads. Whoever calls a function of it
 * while runtime.serialize is set holds runtime.lock, except at import and for Error_string. MPI calls own_reductions in
 * the thread of an MPI call.
 */
#ifndef JAXMPI_MPI_TABLE_H
#define JAXMPI_MPI_TABLE_H

#include "core/core.h"
#include ABI_HEADER

typedef int MPI_Comm_copy_attr_function(MPI_Comm, int, void *, void *, void *, int *);
typedef int MPI_Comm_delete_attr_function(MPI_Comm, int, void *, void *);
typedef void MPI_User_function(void *, void *, int *, MPI_Datatype *);

enum { MPI_SUCCESS = 0 };

/* name -> name_openmpi, ...: a name that is not static exists once per ABI. */
#define ABI_JOIN2(name, abi) name##_##abi
#define ABI_JOIN(name, abi)  ABI_JOIN2(name, abi)
#define ABI_LOCAL(name)      ABI_JOIN(name, ABI_NAME)

#define mpi              ABI_LOCAL(mpi)
#define own_reductions   ABI_LOCAL(own_reductions)
#define operation_bodies ABI_LOCAL(operation_bodies)
#define post_send        ABI_LOCAL(post_send)
#define match_messages   ABI_LOCAL(match_messages)
#define test_begun       ABI_LOCAL(test_begun)

struct mpi_table {
#define REQUIRED(name, parameters) int(*name) parameters;
#define OPTIONAL(name, parameters) int(*name) parameters; /* may be NULL */
#include "mpi/mpi.def"
#undef REQUIRED
#undef OPTIONAL
};
extern struct mpi_table mpi; /* written once, by `load` */

/* Our element-wise reductions of a dtype, in the order SUM, PROD, MAX, MIN; NULL: MPI's is used. */
struct own_reductions {
  const char *dtype; /* NULL at the end of the list */
  MPI_User_function *functions[4];
};
extern const struct own_reductions own_reductions[];

/* In the order of ops.def. */
extern ffi_error *(*const operation_bodies[])(struct call *);

/* See struct abi. */
int post_send(const struct call *call, intptr_t *request);
void match_messages(const struct communicator *comm);
bool test_begun(struct request *request);

#endif
