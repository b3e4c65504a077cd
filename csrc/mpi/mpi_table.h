/* The MPI library in one ABI: types, constants and functions.
 *
 * Only the sources that are compiled once per ABI include this file. There, ABI_HEADER names the header in mpi/abi/. No
 * mpi.h is used: the library is the one that mpi4py has loaded, and the functions are looked up by name.
 *
 * Threads: `mpi` is filled once, at import under the GIL. Then all threads read it. While runtime.serialize is set, the
 * caller of a function holds runtime.lock, except at import and for Error_string and Error_class.
 */
#ifndef JAXMPI_MPI_TABLE_H
#define JAXMPI_MPI_TABLE_H

#include "core/runtime.h"

#include ABI_HEADER

typedef int MPI_Comm_copy_attr_function(MPI_Comm, int, void *, void *, void *, int *);
typedef int MPI_Comm_delete_attr_function(MPI_Comm, int, void *, void *);
typedef void MPI_User_function(void *, void *, int *, MPI_Datatype *);

enum { MPI_SUCCESS = 0 };

/* name -> name_openmpi, ...: a name that is not static exists once per ABI. */
#define ABI_JOIN2(name, abi) name##_##abi
#define ABI_JOIN(name, abi)  ABI_JOIN2(name, abi)
#define ABI_LOCAL(name)      ABI_JOIN(name, ABI_NAME)

#define mpi ABI_LOCAL(mpi)

struct mpi_table {
#define REQUIRED(name, parameters) int(*name) parameters;
#define OPTIONAL(name, parameters) int(*name) parameters; /* may be NULL */
#include "mpi/mpi.def"
#undef REQUIRED
#undef OPTIONAL
};
extern struct mpi_table mpi; /* written once, by `load` */

#endif
