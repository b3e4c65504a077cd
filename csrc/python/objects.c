/* The objects that compiled programs refer to by number. Called under the GIL. */
#include "python/helpers.h"

#include <stdio.h>

#include "core/indices.h"
#include "core/plan.h"
#include "core/registry.h"
#include "execute/agreement.h"
#include "python/methods.h"

/* Add a reduction to the registry. Return the number. */
static PyObject *reduction_number(intptr_t handle, enum reducer by, const char *name, const void *users, int width) {
  struct reduction *reduction = reduction_add(handle, by, name);
  if (reduction != NULL) reduction->users = users, reduction->width = width;
  return reduction != NULL ? PyLong_FromLongLong(reduction->number) : PyErr_NoMemory();
}

/* Return {name: number}, our own reductions of this dtype. */
static PyObject *own_operations(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *dtype;
  intptr_t handles[4];
  if (!PyArg_ParseTuple(args, "s", &dtype) || !is_loaded()) return NULL;
  int code = runtime.abi->own_operations(dtype, handles);
  if (code != 0) return raise_mpi_error(code);
  static const char *const names[] = {"SUM", "PROD", "MAX", "MIN"};
  PyObject *result = PyDict_New();
  for (int i = 0; result != NULL && i < 4; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s of %s", names[i], dtype);
    if (handles[i] != 0 && dict_put(result, names[i], reduction_number(handles[i], REDUCER_OURS, name, NULL, 0)) < 0)
      Py_CLEAR(result);
  }
  return result;
}

/* Register an operation of MPI, the same in each run, or of a user. For a user's: `address` and `width` are the address
 * and the bytes of the handle in the user's object, which must stay for ever. */
static PyObject *reduction(PyObject *Py_UNUSED(self), PyObject *args) {
  Py_ssize_t handle, address = 0;
  const char *name;
  int width = 0;
  if (!PyArg_ParseTuple(args, "ns|ni", &handle, &name, &address, &width)) return NULL;
  return reduction_number((intptr_t)handle, address != 0 ? REDUCER_USER : REDUCER_MPI, name, (const void *)address,
                          width);
}

/* The lasting number of the communicator; a recycled handle has another. `stable_key` distinguishes it from all others,
 * and is the same in each run. */
static PyObject *communicator(PyObject *Py_UNUSED(self), PyObject *args) {
  Py_ssize_t handle;
  const char *stable_key = NULL;
  struct communicator *comm;
  if (!PyArg_ParseTuple(args, "n|s", &handle, &stable_key) || !is_loaded()) return NULL;
  if (runtime_has_ended()) return PyErr_Format(PyExc_RuntimeError, "jaxmpi: %s", runtime.ended);
  if (runtime.serialize) { /* the thread that holds the lock may need the GIL, for a reduction written in Python */
    PyThreadState *state = PyEval_SaveThread();
    pthread_mutex_lock(&runtime.lock);
    PyEval_RestoreThread(state);
  }
  int code = runtime.abi->communicator((intptr_t)handle, stable_key, &comm);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  if (code != 0) return raise_mpi_error(code);
  if (comm == NULL) Py_RETURN_NONE;
  return Py_BuildValue("(Lii)", (long long)comm->number, comm->rank, comm->size);
}

/* Return the numbers of the communicators that have been freed since the last call. */
static PyObject *take_freed(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  PyObject *numbers = PyList_New(0);
  struct communicator *comm = atomic_exchange(&runtime.freed, NULL);
  for (; numbers != NULL && comm != NULL; comm = comm->next_freed) {
    PyObject *number = PyLong_FromLongLong(comm->number);
    if (number == NULL || PyList_Append(numbers, number) < 0) Py_CLEAR(numbers);
    Py_XDECREF(number);
  }
  return numbers;
}

/* Register an MPI_Status or a text, which must stay for ever. */
static PyObject *register_object(PyObject *Py_UNUSED(self), PyObject *args) {
  Py_ssize_t address;
  if (!PyArg_ParseTuple(args, "n", &address)) return NULL;
  return number_of(registry_add((void *)address, NULL));
}

/* Read 64-bit integers and the stable key, which distinguishes an object from all others. False: an exception is set.
 */
static bool read_integers(PyObject *args, const int64_t **values, size_t *count, const char **stable_key) {
  const char *bytes;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "y#s", &bytes, &size, stable_key)) return false;
  *values = (const int64_t *)(const void *)bytes;
  *count = (size_t)size / sizeof **values;
  if ((uintptr_t)bytes % sizeof **values == 0) return true;
  PyErr_SetString(PyExc_ValueError, "the numbers do not lie as 64-bit integers do");
  return false;
}

/* Make the plan that these integers describe, in the order of plan.c. Return the number. */
static PyObject *make_plan(PyObject *Py_UNUSED(self), PyObject *args) {
  const int64_t *values;
  const char *stable_key;
  size_t count;
  if (!read_integers(args, &values, &count, &stable_key)) return NULL;
  struct plan *plan = plan_make(values, count);
  if (plan == NULL) return PyErr_Format(PyExc_ValueError, "these numbers describe no plan, or there is no memory");
  return number_of(registry_add(plan, stable_key));
}

/* Make a list of indices. Return the number. */
static PyObject *make_indices(PyObject *Py_UNUSED(self), PyObject *args) {
  const int64_t *values;
  const char *stable_key;
  size_t count;
  if (!read_integers(args, &values, &count, &stable_key)) return NULL;
  struct indices *list = indices_make(values, count);
  if (list == NULL) return PyErr_Format(PyExc_ValueError, "an index is negative, or there is no memory");
  return number_of(registry_add(list, stable_key));
}

/* Keep a number for the communicator with this stable key. */
static PyObject *reserve(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *stable_key;
  if (!PyArg_ParseTuple(args, "s", &stable_key)) return NULL;
  if (registry_reserve(stable_key) == 0) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

/* Let the ranks of this communicator compare so many of the next collectives. All arguments are the same on all of
 * them. `name`: 0, or a number that no other communicator has. `ranks`: in COMM_WORLD, 32-bit integers. */
static PyObject *compare(PyObject *Py_UNUSED(self), PyObject *args) {
  long long number, calls, name;
  const char *ranks;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "LLLy#", &number, &calls, &name, &ranks, &bytes)) return NULL;
  struct communicator *comm = registry_at(number);
  if (comm == NULL || bytes != (Py_ssize_t)sizeof(int) * comm->size)
    return PyErr_Format(PyExc_ValueError, "no communicator of %zd ranks has the number %lld",
                        bytes / (Py_ssize_t)sizeof(int), number);
  if (!agreement_prepare(comm, name, (const int *)(const void *)ranks)) return PyErr_NoMemory();
  atomic_store(&comm->to_compare, calls);
  Py_RETURN_NONE;
}

/* End all work on a revoked communicator: its calls raise, as if it were freed, and its requests are given up. Returns
 * how many. */
static PyObject *give_up(PyObject *Py_UNUSED(self), PyObject *args) {
  long long number;
  if (!PyArg_ParseTuple(args, "L", &number)) return NULL;
  struct communicator *comm = communicator_at(number);
  if (comm == NULL) return NULL;
  PyThreadState *state = PyEval_SaveThread();
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  int64_t count = runtime.abi->give_up(comm);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  PyEval_RestoreThread(state);
  return PyLong_FromLongLong(count);
}

PyMethodDef objects_methods[] = {
    {"own_operations", own_operations, METH_VARARGS, NULL},
    {"reduction", reduction, METH_VARARGS, NULL},
    {"communicator", communicator, METH_VARARGS, NULL},
    {"take_freed", take_freed, METH_NOARGS, NULL},
    {"register", register_object, METH_VARARGS, NULL},
    {"plan", make_plan, METH_VARARGS, NULL},
    {"indices", make_indices, METH_VARARGS, NULL},
    {"give_up", give_up, METH_VARARGS, NULL},
    {"reserve", reserve, METH_VARARGS, NULL},
    {"compare", compare, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
