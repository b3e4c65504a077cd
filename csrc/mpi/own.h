/* Our own reductions, where MPI's are missing or differ. Threads: MPI calls them in the thread of an MPI call. */
#ifndef JAXMPI_OWN_H
#define JAXMPI_OWN_H

#include "mpi/mpi_table.h"

#define own_reductions ABI_LOCAL(own_reductions)

/* Our own element-wise reductions of a dtype, in the order SUM, PROD, MAX, MIN. NULL: MPI's is used. */
struct own_reductions {
  const char *dtype; /* NULL at the end of the list */
  MPI_User_function *functions[4];
};
extern const struct own_reductions own_reductions[];

#endif
