/* Where the Python program is, for a report of the watchdog: what call_site.c adds to the module.
 *
 * Threads: the main thread calls call_site_watch as it imports the package, under the GIL. */
#ifndef JAXMPI_CALL_SITE_H
#define JAXMPI_CALL_SITE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char call_site_watch_doc[];
PyObject *call_site_watch(PyObject *self, PyObject *args);

#endif
