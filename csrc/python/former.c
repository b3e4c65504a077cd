/* The settings one by one, as they were before `configure`. Called under the GIL. */
#include "python/helpers.h"

#include <string.h>

#include "core/registry.h"
#include "python/methods.h"

static PyObject *set_flag(PyObject *args, atomic_bool *flag) {
  int on;
  if (!PyArg_ParseTuple(args, "p", &on)) return NULL;
  atomic_store(flag, on != 0);
  Py_RETURN_NONE;
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

PyMethodDef former_methods[] = {
    {"set_devices", set_devices, METH_VARARGS, set_devices_doc},
    {"set_chunk", set_chunk, METH_VARARGS, set_chunk_doc},
    {"set_name", set_name, METH_VARARGS, set_name_doc},
    {"set_check", set_check, METH_VARARGS, set_check_doc},
    {"set_several_threads", set_several_threads, METH_NOARGS, set_several_threads_doc},
    {"set_ends_on_error", set_ends_on_error, METH_VARARGS, set_ends_on_error_doc},
    {"set_log", set_log, METH_VARARGS, set_log_doc},
    {"set_max_count", set_max_count, METH_VARARGS, set_max_count_doc},
    {"set_piece", set_piece, METH_VARARGS, set_piece_doc},
    {"set_most_tag", set_most_tag, METH_VARARGS, set_most_tag_doc},
    {"set_several_devices", set_several_devices, METH_NOARGS, set_several_devices_doc},
    {NULL, NULL, 0, NULL},
};
