#include "python/helpers.h"

int dict_put(PyObject *dict, const char *key, PyObject *value) {
  int code = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
  Py_XDECREF(value);
  return code;
}

bool is_loaded(void) {
  if (runtime.abi == NULL) PyErr_SetString(PyExc_RuntimeError, "jaxmpi._core.load has not been called");
  return runtime.abi != NULL;
}

PyObject *raise_mpi_error(int code) {
  char text[1024] = "";
  runtime.abi->error_text(code, text);
  return PyErr_Format(PyExc_RuntimeError, "MPI refused: %s", text);
}

struct communicator *communicator_at(long long number) {
  struct communicator *comm = registry_at(number);
  if (comm == NULL) PyErr_Format(PyExc_ValueError, "no communicator has the number %lld", number);
  return comm;
}

PyObject *number_of(int64_t number) { return number != 0 ? PyLong_FromLongLong(number) : PyErr_NoMemory(); }

PyObject *without_gil(void (*function)(void)) {
  PyThreadState *state = PyEval_SaveThread();
  function();
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}
