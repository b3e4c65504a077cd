/* The Python module jaxmpi._core. Nothing here communicates. The source of each topic has the functions. */
#include "python/call_site.h"
#include "python/methods.h"
#include "python/runtime_token.h"

static PyMethodDef of_calls[] = {
    {"make_call", runtime_token_make_call, METH_VARARGS, runtime_token_make_call_doc},
    {"watch", call_site_watch, METH_VARARGS, call_site_watch_doc},
    {NULL, NULL, 0, NULL},
};

static int add_functions(PyObject *module) {
  PyMethodDef *const topics[] = {library_methods, tables_methods,  settings_methods, objects_methods,
                                 observe_methods, sharded_methods, of_calls};
  int code = 0;
  for (size_t i = 0; i < sizeof topics / sizeof *topics && code == 0; i++)
    code = PyModule_AddFunctions(module, topics[i]);
  return code;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_functions}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The C core of jaxmpi.", 0, NULL, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
