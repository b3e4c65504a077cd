/* Calls of compiled code in program order. The link is an empty array that one computation returns and the next one
 * takes as an operand; this file passes it from call to call. It is in C because every call runs it.
 * _jax/runtime_token.py says what the link means and names the attributes of JAX's objects.
 *
 * Functions that return PyObject * return a new reference, or NULL with an exception set. */
#include "python/runtime_token.h"

#include <stdlib.h>

#include "core/failure.h"

/* Indices into the tuple that is the `self` of a linked function. */
enum { COMPUTE, TOKENS, EFFECT, RENEW, HEAL, ERROR, NAMES, PARTS };
enum { CURRENT, ARRAY, PENDING, IS_READY, COMMITTED, NAME_COUNT };

static PyObject *part_of(PyObject *self, int index) { return PyTuple_GetItem(self, index); }
static PyObject *name_of(PyObject *self, int index) { return PyTuple_GetItem(part_of(self, NAMES), index); }

/* 1, 0, or -1 with an exception set; steals `value`. */
static int truth(PyObject *value) {
  int result = value == NULL ? -1 : PyObject_IsTrue(value);
  Py_XDECREF(value);
  return result;
}

/* This thread's runtime token for the effect; if it is not one of ours, a new one (RENEW). Ours have an attribute
 * `pending`: runtime.failures before the call if its computation may have failed since, otherwise None. */
static PyObject *find_token(PyObject *self, PyObject **pending) {
  PyObject *current = PyObject_GetAttr(part_of(self, TOKENS), name_of(self, CURRENT));
  if (current == NULL) return NULL;
  PyObject *token = PyDict_GetItemWithError(current, part_of(self, EFFECT));
  Py_XINCREF(token);
  Py_DECREF(current);
  if (token == NULL && PyErr_Occurred()) return NULL;
  if (token != NULL) {
    *pending = PyObject_GetAttr(token, name_of(self, PENDING));
    if (*pending != NULL) return token;
    PyErr_Clear();
    Py_DECREF(token);
  }
  token = PyObject_CallFunctionObjArgs(part_of(self, RENEW), NULL);
  if (token != NULL) *pending = PyObject_GetAttr(token, name_of(self, PENDING));
  return token;
}

/* The link to pass on. If its computation has failed the link is replaced (HEAL), for it would make the next
 * computation fail too. That is possible only if `pending` is not None: the computation was still running when its call
 * returned, or an operation failed during the call. A link that is committed to one of several devices is replaced too,
 * for it would commit the next computation to that device. */
static PyObject *find_array(PyObject *self, PyObject *token, PyObject *pending) {
  bool several = atomic_load_explicit(&runtime.several_devices, memory_order_relaxed);
  PyObject *array = PyObject_GetAttr(token, name_of(self, ARRAY));
  if (array == NULL || (pending == Py_None && !several)) return array;
  int heal = 1;
  if (pending == Py_None) heal = truth(PyObject_GetAttr(array, name_of(self, COMMITTED)));
  if (heal == 0) return array;
  Py_DECREF(array);
  if (heal < 0) return NULL;
  long before = pending != Py_None ? PyLong_AsLong(pending) : 0;
  if (before == -1 && PyErr_Occurred()) return NULL;
  bool failed = pending != Py_None && before != atomic_load(&runtime.failures);
  PyObject *done = PyObject_CallFunctionObjArgs(part_of(self, HEAL), token, failed ? Py_True : Py_False, NULL);
  if (done == NULL) return NULL;
  Py_DECREF(done);
  return PyObject_GetAttr(token, name_of(self, ARRAY));
}

/* compute(array, *args, **kwargs). `arguments` has `count` positional ones, then the values of the keywords `names`. */
static PyObject *compute(PyObject *self, PyObject *array, PyObject *const *arguments, Py_ssize_t count,
                         PyObject *names) {
  PyObject *results = NULL, *operands = PyTuple_New(count + 1), *keywords = names != NULL ? PyDict_New() : NULL;
  bool made = operands != NULL && (names == NULL || keywords != NULL);
  for (Py_ssize_t i = 0; made && i <= count; i++) {
    PyObject *operand = i == 0 ? array : arguments[i - 1];
    Py_INCREF(operand);
    PyTuple_SetItem(operands, i, operand);
  }
  for (Py_ssize_t i = 0; made && names != NULL && i < PyTuple_Size(names); i++)
    made = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), arguments[count + i]) == 0;
  if (made) results = PyObject_Call(part_of(self, COMPUTE), operands, keywords);
  Py_XDECREF(operands);
  Py_XDECREF(keywords);
  return results;
}

/* Keeps the link of the results (link, result) for the next call. Sets `pending`: `failures`, the count before the
 * call, if the computation is still running or an operation failed during the call; otherwise None. -1 with an
 * exception set. */
static int keep_link(PyObject *self, PyObject *token, PyObject *results, long failures) {
  PyObject *array = PyTuple_GetItem(results, 0);
  if (array == NULL || PyObject_SetAttr(token, name_of(self, ARRAY), array) < 0) return -1;
  int ready = truth(PyObject_CallMethodObjArgs(array, name_of(self, IS_READY), NULL));
  if (ready < 0) return -1;
  if (ready && atomic_load(&runtime.failures) == failures)
    return PyObject_SetAttr(token, name_of(self, PENDING), Py_None);
  PyObject *pending = PyLong_FromLong(failures);
  int code = pending == NULL ? -1 : PyObject_SetAttr(token, name_of(self, PENDING), pending);
  Py_XDECREF(pending);
  return code;
}

/* Replaces the exception that is set by the one that users are to see (ERROR), and keeps its traceback. `failed`: an
 * operation has failed during the call. */
static void raise_as_error(PyObject *self, bool failed) {
  PyObject *type, *value, *trace, *made = NULL;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value != NULL)
    made = PyObject_CallFunctionObjArgs(part_of(self, ERROR), value, failed ? Py_True : Py_False, NULL);
  if (made == NULL || made == value) {
    PyErr_Clear();
    Py_XDECREF(made);
    PyErr_Restore(type, value, trace);
    return;
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  type = PyObject_Type(made);
  PyErr_Restore(type, made, trace);
}

static PyObject *call_linked(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
  struct failure *failure = failure_of_thread();
  if (!importer) atomic_store_explicit(&runtime.several_threads, true, memory_order_relaxed);
  if (failure != NULL) {
    PyErr_Format(PyExc_ValueError, "not called, because an operation before it has failed: %s", failure->text);
    free(failure);
    raise_as_error(self, true);
    return NULL;
  }
  PyObject *result = NULL, *results = NULL, *array = NULL, *pending = NULL, *token = find_token(self, &pending);
  if (pending != NULL) array = find_array(self, token, pending);
  long failures = atomic_load(&runtime.failures);
  if (array != NULL) results = compute(self, array, arguments, count, names);
  if (results == NULL && atomic_load(&runtime.failures) > 0)
    raise_as_error(self, atomic_load(&runtime.failures) != failures);
  if (results != NULL && keep_link(self, token, results, failures) == 0) {
    result = PyTuple_GetItem(results, 1);
    Py_XINCREF(result);
  }
  Py_XDECREF(results);
  Py_XDECREF(array);
  Py_XDECREF(pending);
  Py_XDECREF(token);
  return result;
}

const char runtime_token_linker_doc[] =
    "linker(compute, tokens, effect, renew, heal, error, names) -> function of (*args, **kwargs)\n\n"
    "Calls compute(link, *args, **kwargs) -> (link, result) in the order of the effect; returns the result.";
PyObject *runtime_token_linker(PyObject *module, PyObject *args) {
  static PyMethodDef method = {"linked", (PyCFunction)(void (*)(void))call_linked, METH_FASTCALL | METH_KEYWORDS, NULL};
  (void)module;
  PyObject *names = PyTuple_Size(args) == PARTS ? PyTuple_GetItem(args, NAMES) : NULL;
  if (names == NULL || !PyTuple_Check(names) || PyTuple_Size(names) != NAME_COUNT)
    return PyErr_Format(PyExc_TypeError, "%d arguments expected, the last one of %d names", PARTS, NAME_COUNT);
  return PyCFunction_New(&method, args);
}
