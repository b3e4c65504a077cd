#include "mpi/mpi_table.h"

struct mpi_table mpi;
