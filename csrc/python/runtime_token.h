/* Calls of compiled code in program order, for Python: what runtime_token.c adds to the module.
 *
 * Threads: link_make and the function that it makes are called by any Python thread, under the GIL; they take no lock.
 * A deferred error is raised in the thread that imported the package. */
#ifndef JAXMPI_RUNTIME_TOKEN_H
#define JAXMPI_RUNTIME_TOKEN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char runtime_token_make_call_doc[];

/* make_call(...) -> function of (*args, **kwargs): see its docstring. */
PyObject *runtime_token_make_call(PyObject *module, PyObject *args);

#endif
