/* The Python module jaxmpi._core. Nothing here communicates. The source of each topic has the functions. */
#include "python/methods.h"

static int add_functions(PyObject *module) {
  PyMethodDef *const topics[] = {library_methods, tables_methods,  settings_methods,      objects_methods,
                                 observe_methods, sharded_methods, runtime_token_methods, call_site_methods};
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
