/* Calls of compiled code in program order, for Python: what runtime_token.c adds to the module.
 *
 * Threads: any Python thread calls runtime_token_make_call and the function that it returns, under the GIL. They take
 * no lock. The thread that imported the package raises deferred errors. */
#ifndef JAXMPI_RUNTIME_TOKEN_H
#define JAXMPI_RUNTIME_TOKEN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char runtime_token_make_call_doc[];

/* make_call(...) -> function of (*args, **kwargs): see its docstring. */
PyObject *runtime_token_make_call(PyObject *module, PyObject *args);

#endif
