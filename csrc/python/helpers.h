/* Helpers of the sources of the Python module. Functions that return PyObject * return a new reference, or NULL with an
 * exception set.
 *
 * Threads: called under the GIL; without_gil gives it up for a moment. */
#ifndef JAXMPI_HELPERS_H
#define JAXMPI_HELPERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "core/abi.h"

/* Stores `value`, which it steals. -1 with an exception set: it is NULL or cannot be stored. */
int dict_put(PyObject *dict, const char *key, PyObject *value);

/* Whether an MPI library has been loaded. False with an exception set. */
bool is_loaded(void);

/* The exception for an error code of MPI; NULL. */
PyObject *raise_mpi_error(int code);

/* The communicator with this number; NULL with an exception set: there is none. */
struct communicator *communicator_at(long long number);

/* Calls a function without the GIL; None. */
PyObject *without_gil(void (*function)(void));

#endif
