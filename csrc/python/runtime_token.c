/* Calls of compiled code in program order. The link is an empty array. One computation returns it, and the next one
 * takes it as an operand. This file passes it from call to call. It is in C because every call runs it.
 *
 * A computation that XLA executes in the calling thread returns no link, because the communication is over when the
 * call returns (`done_here`). That saves a sixth of a call. Whether XLA does so is guessed when the function is traced,
 * from the number of elements that it computes. Order does not depend on the guess: if it was wrong, the call waits.
 *
 * _jax/runtime_token.py explains what the link means and names the attributes of JAX's objects.
 *
 * Threads: any Python thread calls make_call and the functions that it returns, under the GIL. They take no lock. The
 * thread that imported the package raises deferred errors.
 *
 * Functions that return PyObject * return a new reference, or NULL with an exception set. */
#include "python/methods.h"

#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>

#include "core/failure.h"
#include "execute/entry.h"

/* The function, the function in its place, and the hooks; attributes in Python; weak references. */
enum { COMPUTE, OTHERWISE, CLEAN, DISABLED, TOKENS, EFFECT, RENEW, HEAL, ERROR, WAIT, METHOD, PARTS };
static const char *const hook_names[PARTS] = {
    [CLEAN] = "clean", [DISABLED] = "disabled", [TOKENS] = "tokens", [EFFECT] = "effect", [RENEW] = "renew",
    [HEAL] = "heal",   [ERROR] = "error",       [WAIT] = "wait",     [METHOD] = "method"};
enum { CURRENT, ARRAY, PENDING, VALUE, COMMITTED, NAME_COUNT };
struct jitted {
  PyObject_HEAD;
  PyObject *parts[PARTS], *names[NAME_COUNT], *dictionary, *weak;
  int waited; /* how many short computations the call waited for */
};

/* After so many waits, the short computations of a function have a link, too. They are compiled again for this. */
enum { MOST_WAITS = 4 };

/* Return 1, 0, or -1 with an exception set. Steal `value`. */
static int truth(PyObject *value) {
  int result = value == NULL ? -1 : PyObject_IsTrue(value);
  Py_XDECREF(value);
  return result;
}

/* Return this thread's runtime token for the effect; if it is not one of ours, a new one (RENEW). Ours have an
 * attribute `pending`: runtime.failures before the call if its computation may have failed since; otherwise None. */
static PyObject *find_token(struct jitted *self, PyObject **pending) {
  PyObject *current = PyObject_GetAttr(self->parts[TOKENS], self->names[CURRENT]);
  if (current == NULL) return NULL;
  PyObject *token = PyDict_GetItemWithError(current, self->parts[EFFECT]);
  Py_XINCREF(token);
  Py_DECREF(current);
  if (token == NULL && PyErr_Occurred()) return NULL;
  if (token != NULL) {
    *pending = PyObject_GetAttr(token, self->names[PENDING]);
    if (*pending != NULL) return token;
    PyErr_Clear();
    Py_DECREF(token);
  }
  token = PyObject_CallFunctionObjArgs(self->parts[RENEW], NULL);
  if (token != NULL) *pending = PyObject_GetAttr(token, self->names[PENDING]);
  return token;
}

/* Return the link to pass on. If its computation has failed, the link is replaced (HEAL), because it would make the
 * next computation fail, too. That is possible only if `pending` is not None: the computation had not ended when its
 * call returned, or an operation failed during the call. A link that is committed to one of several devices is
 * replaced, too, because it would commit the next computation to that device. */
static PyObject *find_array(struct jitted *self, PyObject *token, PyObject *pending) {
  bool several = atomic_load_explicit(&runtime.several_devices, memory_order_relaxed);
  PyObject *array = PyObject_GetAttr(token, self->names[ARRAY]);
  if (array == NULL || (pending == Py_None && !several)) return array;
  int heal = 1;
  if (pending == Py_None) heal = truth(PyObject_GetAttr(array, self->names[COMMITTED]));
  if (heal == 0) return array;
  Py_DECREF(array);
  if (heal < 0) return NULL;
  long before = pending != Py_None ? PyLong_AsLong(pending) : 0;
  if (before == -1 && PyErr_Occurred()) return NULL;
  bool failed = pending != Py_None && before != atomic_load(&runtime.failures);
  PyObject *done = PyObject_CallFunctionObjArgs(self->parts[HEAL], token, failed ? Py_True : Py_False, NULL);
  if (done == NULL) return NULL;
  Py_DECREF(done);
  return PyObject_GetAttr(token, self->names[ARRAY]);
}

/* Call compute(link, *args, **kwargs). */
static PyObject *compute(struct jitted *self, PyObject *array, PyObject *args, PyObject *keywords) {
  Py_ssize_t count = PyTuple_Size(args);
  PyObject *link = self->waited < MOST_WAITS ? array : PyTuple_Pack(1, array);
  if (link == array) Py_INCREF(link);
  PyObject *operands = link != NULL ? PyTuple_New(count + 1) : NULL;
  if (operands == NULL) return Py_XDECREF(link), NULL;
  PyTuple_SetItem(operands, 0, link);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *operand = PyTuple_GetItem(args, i);
    Py_INCREF(operand);
    PyTuple_SetItem(operands, i + 1, operand);
  }
  PyObject *results = PyObject_Call(self->parts[COMPUTE], operands, keywords);
  Py_DECREF(operands);
  return results;
}

/* Wait for a short computation that XLA has not executed in this thread. Return -1 with an exception set. */
static int wait_for(struct jitted *self, PyObject *results) {
  PyObject *done = PyObject_CallFunctionObjArgs(self->parts[WAIT], results, NULL);
  Py_XDECREF(done);
  self->waited++;
  return done != NULL ? 0 : -1;
}

/* Keep the link of the results (link, result) for the next call. `done`: the computation had ended when the call
 * returned. Set `pending` to None if it was `done` and no operation failed meanwhile; otherwise to `failures`, the
 * count before the call. A short computation has no link, because XLA should have executed it in this thread. If XLA
 * did not, because operands were still being computed, this waits for it. Return -1 with an exception set. */
static int keep_link(struct jitted *self, PyObject *token, PyObject *results, long failures, bool done) {
  PyObject *array = PyTuple_GetItem(results, 0);
  if (array == NULL) return -1;
  if (PyTuple_Check(array)) return 0;
  if (array != Py_None && PyObject_SetAttr(token, self->names[ARRAY], array) < 0) return -1;
  if (array == Py_None && !done && wait_for(self, results) < 0) return -1;
  if (done && atomic_load(&runtime.failures) == failures) return PyObject_SetAttr(token, self->names[PENDING], Py_None);
  PyObject *pending = PyLong_FromLong(failures);
  int code = pending == NULL ? -1 : PyObject_SetAttr(token, self->names[PENDING], pending);
  Py_XDECREF(pending);
  return code;
}

/* Replace the exception that is set by the exception for users (ERROR), and keep the traceback. `failed`: an
 * operation has failed during the call. */
static void raise_as_error(struct jitted *self, bool failed) {
  PyObject *type, *value, *trace, *error = NULL;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value != NULL) error = PyObject_CallFunctionObjArgs(self->parts[ERROR], value, failed ? Py_True : Py_False, NULL);
  if (error == NULL || error == value) {
    PyErr_Clear();
    Py_XDECREF(error);
    PyErr_Restore(type, value, trace);
    return;
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  type = PyObject_Type(error);
  PyErr_Restore(type, error, trace);
}

/* Call the function in the order of the effect, outside of any trace. */
static PyObject *call_in_order(struct jitted *self, PyObject *args, PyObject *keywords) {
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
  unsigned before = done_here;
  if (array != NULL) results = compute(self, array, args, keywords);
  bool done = done_here != before;
  done_here = before; /* only the outer call counts */
  if (results == NULL && atomic_load(&runtime.failures) > 0)
    raise_as_error(self, atomic_load(&runtime.failures) != failures);
  if (results != NULL && keep_link(self, token, results, failures, done) == 0) {
    result = PyTuple_GetItem(results, 1);
    Py_XINCREF(result);
  }
  Py_XDECREF(results);
  Py_XDECREF(array);
  Py_XDECREF(pending);
  Py_XDECREF(token);
  return result;
}

/* Return whether to call OTHERWISE: inside a trace, or where jax.disable_jit is set. Return -1 with an exception set.
 */
static int is_otherwise(struct jitted *self) {
  if (self->parts[OTHERWISE] == Py_None) return 0;
  int clean = truth(PyObject_CallFunctionObjArgs(self->parts[CLEAN], NULL));
  if (clean != 1) return clean == 0 ? 1 : -1;
  return truth(PyObject_GetAttr(self->parts[DISABLED], self->names[VALUE]));
}

/* --- the type --- */

static PyObject *jitted_call(PyObject *object, PyObject *args, PyObject *keywords) {
  struct jitted *self = (struct jitted *)object;
  int otherwise = is_otherwise(self);
  if (otherwise < 0) return NULL;
  return otherwise ? PyObject_Call(self->parts[OTHERWISE], args, keywords) : call_in_order(self, args, keywords);
}

static PyObject *jitted_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(type)) {
  if (instance != NULL && instance != Py_None)
    return PyObject_CallFunctionObjArgs(((struct jitted *)self)->parts[METHOD], self, instance, NULL);
  Py_INCREF(self);
  return self;
}

static PyObject *jitted_repr(PyObject *self) {
  PyObject *wrapped = PyObject_GetAttrString(self, "__wrapped__");
  if (wrapped == NULL) PyErr_Clear();
  PyObject *text = PyUnicode_FromFormat("<jaxmpi.jit of %R>", wrapped != NULL ? wrapped : Py_None);
  Py_XDECREF(wrapped);
  return text;
}

/* Pickled by name, like functions. */
static PyObject *jitted_reduce(PyObject *self, PyObject *Py_UNUSED(args)) {
  return PyObject_GetAttrString(self, "__qualname__");
}

static int jitted_traverse(PyObject *object, visitproc visit, void *arg) {
  struct jitted *self = (struct jitted *)object;
  Py_VISIT(Py_TYPE(object));
  for (int i = 0; i < PARTS; i++) Py_VISIT(self->parts[i]);
  Py_VISIT(self->dictionary);
  return 0;
}

static int jitted_clear(PyObject *object) {
  struct jitted *self = (struct jitted *)object;
  for (int i = 0; i < PARTS; i++) Py_CLEAR(self->parts[i]);
  for (int i = 0; i < NAME_COUNT; i++) Py_CLEAR(self->names[i]);
  Py_CLEAR(self->dictionary);
  return 0;
}

static void jitted_free(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (((struct jitted *)self)->weak != NULL) PyObject_ClearWeakRefs(self);
  jitted_clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

static PyTypeObject *type_of_jitted(void) {
  static PyTypeObject *type; /* under the GIL */
  static PyMethodDef methods[] = {{"__reduce__", jitted_reduce, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
  static PyMemberDef members[] = {
      {"__dictoffset__", T_PYSSIZET, offsetof(struct jitted, dictionary), READONLY, NULL},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(struct jitted, weak), READONLY, NULL},
      {NULL, 0, 0, 0, NULL},
  };
  static PyGetSetDef dictionary[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                     {NULL, NULL, NULL, NULL, NULL}};
  static PyType_Slot slots[] = {
      {Py_tp_call, (void *)jitted_call},   {Py_tp_descr_get, (void *)jitted_get},
      {Py_tp_repr, (void *)jitted_repr},   {Py_tp_traverse, (void *)jitted_traverse},
      {Py_tp_clear, (void *)jitted_clear}, {Py_tp_dealloc, (void *)jitted_free},
      {Py_tp_methods, (void *)methods},    {Py_tp_members, (void *)members},
      {Py_tp_getset, (void *)dictionary},  {0, NULL},
  };
  static PyType_Spec spec = {"jaxmpi.Jitted", sizeof(struct jitted), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  if (type == NULL) type = (PyTypeObject *)PyType_FromSpec(&spec);
  return type;
}

/* make_call(compute, otherwise, hooks) -> function of (*args, **kwargs). The function calls compute(link, *args,
 * **kwargs) -> (link, result) in the order of the effect, and returns the result. `hooks` has the attributes of
 * _jax/runtime_token.py's Hooks. */
static PyObject *make_call(PyObject *Py_UNUSED(module), PyObject *args) {
  PyObject *compute, *otherwise, *hooks, *names;
  if (!PyArg_ParseTuple(args, "OOO", &compute, &otherwise, &hooks)) return NULL;
  if ((names = PyObject_GetAttrString(hooks, "names")) == NULL) return NULL;
  PyTypeObject *type = type_of_jitted();
  struct jitted *self = type != NULL ? (struct jitted *)PyType_GenericAlloc(type, 0) : NULL;
  bool whole = self != NULL;
  if (whole) {
    Py_INCREF(self->parts[COMPUTE] = compute);
    Py_INCREF(self->parts[OTHERWISE] = otherwise);
  }
  for (int i = CLEAN; whole && i < PARTS; i++)
    whole = (self->parts[i] = PyObject_GetAttrString(hooks, hook_names[i])) != NULL;
  for (int i = 0; whole && i < NAME_COUNT; i++) whole = (self->names[i] = PySequence_GetItem(names, i)) != NULL;
  Py_DECREF(names);
  if (!whole) Py_CLEAR(self);
  return (PyObject *)self;
}

PyMethodDef runtime_token_methods[] = {{"make_call", make_call, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
