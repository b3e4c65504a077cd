/* For JAX's sharded programs. Called under the GIL. */
#include "python/helpers.h"

#include <stdlib.h>

#include "core/runtime.h"
#include "python/methods.h"
#include "sharded/sharded.h"

/* Set the numbers of the reductions that JAX's sharded programs use for a type. */
static PyObject *set_reductions(PyObject *Py_UNUSED(self), PyObject *args) {
  int code;
  long long numbers[4];
  if (!PyArg_ParseTuple(args, "iLLLL", &code, &numbers[0], &numbers[1], &numbers[2], &numbers[3])) return NULL;
  if (datatype_find(code) == NULL) return PyErr_Format(PyExc_ValueError, "no row of dtype.def has the code %d", code);
  for (int i = 0; i < 4; i++) runtime.reductions[code][i] = registry_at(numbers[i]);
  Py_RETURN_NONE;
}

/* Register a group of ranks in COMM_WORLD, a tuple. */
static PyObject *group(PyObject *Py_UNUSED(self), PyObject *args) {
  PyObject *ranks;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &ranks)) return NULL;
  Py_ssize_t size = PyTuple_Size(ranks);
  struct group *group = malloc(sizeof *group + (size_t)size * sizeof *group->ranks); /* in the registry for ever */
  if (group == NULL) return PyErr_NoMemory();
  group->size = (int)size;
  for (Py_ssize_t i = 0; i < size; i++) group->ranks[i] = (int)PyLong_AsLong(PyTuple_GetItem(ranks, i));
  if (!PyErr_Occurred()) return number_of(registry_add(group, NULL));
  free(group);
  return NULL;
}

/* Make the communicator of a group, together with the other ranks. RuntimeError: MPI has refused it. */
static PyObject *connect_group(PyObject *Py_UNUSED(self), PyObject *args) {
  long long number;
  if (!PyArg_ParseTuple(args, "L", &number)) return NULL;
  struct group *group = registry_at(number);
  if (group == NULL) return PyErr_Format(PyExc_ValueError, "no group has the number %lld", number);
  PyThreadState *state = PyEval_SaveThread();
  bool made = sharded_connect(group);
  PyEval_RestoreThread(state);
  if (!made) return PyErr_Format(PyExc_RuntimeError, "%s", sharded_error());
  return PyLong_FromSsize_t(group->handle);
}

/* Set the communicator for which XLA asks next; 0: none. */
static PyObject *expect(PyObject *Py_UNUSED(self), PyObject *args) {
  long long number;
  if (!PyArg_ParseTuple(args, "L", &number)) return NULL;
  struct communicator *comm = number != 0 ? communicator_at(number) : NULL;
  if (number != 0 && comm == NULL) return NULL;
  sharded_expect(comm);
  Py_RETURN_NONE;
}

PyMethodDef sharded_methods[] = {
    {"set_reductions", set_reductions, METH_VARARGS, NULL},
    {"group", group, METH_VARARGS, NULL},
    {"connect", connect_group, METH_VARARGS, NULL},
    {"expect", expect, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
