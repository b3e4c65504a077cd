/* Helpers of the sources of the Python module. Functions that return PyObject * return a new reference, or NULL with an
 * exception set.
 *
 * Threads: called under the GIL. without_gil releases it for a moment. */
#ifndef JAXMPI_HELPERS_H
#define JAXMPI_HELPERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "core/abi.h"

/* Store `value` and steal the reference. -1 with an exception set: it is NULL or cannot be stored. */
int dict_put(PyObject *dict, const char *key, PyObject *value);

/* Return whether an MPI library has been loaded. False: an exception is set. */
bool is_loaded(void);

/* Set the exception for an error code of MPI. Return NULL. */
PyObject *raise_mpi_error(int code);

/* Return the communicator with this number; NULL with an exception set: there is none. */
struct communicator *communicator_at(long long number);

/* Return the number of an object in the registry. NULL with an exception set: it is 0, because there is no memory. */
PyObject *number_of(int64_t number);

/* Call a function without the GIL. Return None. */
PyObject *without_gil(void (*function)(void));

#endif
