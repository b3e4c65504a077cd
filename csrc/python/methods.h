/* The functions of the Python module, by topic: each list ends with a NULL name. Threads: called under the GIL. */
#ifndef JAXMPI_METHODS_H
#define JAXMPI_METHODS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef objects_methods[];
extern PyMethodDef settings_methods[];
extern PyMethodDef tables_methods[];
extern PyMethodDef library_methods[];
extern PyMethodDef observe_methods[];
extern PyMethodDef sharded_methods[];
extern PyMethodDef runtime_token_methods[];
extern PyMethodDef call_site_methods[];

#endif
