/* For reports and timelines, and for the end of a program. Called under the GIL. */
#include "python/helpers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/failure.h"
#include "core/job.h"
#include "core/runtime.h"
#include "devices/nccl.h"
#include "devices/transport.h"
#include "execute/agreement.h"
#include "observe/summary.h"
#include "observe/timeline.h"
#include "observe/watchdog.h"
#include "python/methods.h"
#include "requests/table.h"

/* Name a line of the program that makes calls like this: `attributes` as in compiled programs, and the code and the
 * number of elements of the first array, -1 and 0 without one. */
static PyObject *add_site(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *name, *text;
  PyObject *values;
  int type, row = 0;
  long long count;
  int64_t attributes[MAX_ATTRIBUTES];
  if (!PyArg_ParseTuple(args, "sO!iLs", &name, &PyTuple_Type, &values, &type, &count, &text)) return NULL;
  while (operation_table[row].id != NULL && strcmp(operation_table[row].id, name) != 0) row++;
  if (operation_table[row].id == NULL || PyTuple_Size(values) != operation_table[row].attribute_count)
    return PyErr_Format(PyExc_ValueError, "no operation is called %s with so many attributes", name);
  for (int i = 0; i < operation_table[row].attribute_count; i++)
    attributes[i] = PyLong_AsLongLong(PyTuple_GetItem(values, i));
  if (PyErr_Occurred()) return NULL;
  if (!call_site_add(row, attributes, type, count, text)) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

/* Report this thread from now on as waiting in what `text` names, on a communicator. `text`: a registered text. This
 * ends when the thread calls `leave` with the number. */
static PyObject *enter(PyObject *Py_UNUSED(self), PyObject *args) {
  long long comm, text;
  if (!PyArg_ParseTuple(args, "LL", &comm, &text)) return NULL;
  const void *objects[] = {registry_at(comm), registry_at(text)};
  if (objects[0] == NULL || objects[1] == NULL) return PyErr_Format(PyExc_ValueError, "no communicator, or no text");
  const int64_t summary[] = {ROW_outside, -1, 0, (intptr_t)objects[0], (intptr_t)objects[1]};
  return PyLong_FromVoidPtr(watchdog_begin_summary(summary, (int)(sizeof summary / sizeof *summary)));
}

/* End the wait that `enter` began. */
static PyObject *leave(PyObject *Py_UNUSED(self), PyObject *number) {
  void *record = PyLong_AsVoidPtr(number);
  if (PyErr_Occurred()) return NULL;
  watchdog_end(record);
  Py_RETURN_NONE;
}

/* Return the error of an operation that ended after its call had returned, if it has not been raised yet. */
static PyObject *take_failure(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  struct failure *failure = failure_take();
  if (failure == NULL) Py_RETURN_NONE;
  PyObject *text = PyUnicode_DecodeUTF8(failure->text, (Py_ssize_t)strlen(failure->text), "replace");
  free(failure);
  return text;
}

/* Leave a file RANK.kind in the launcher's folder: core/job.h. False: there is no folder. */
static PyObject *write_job_file(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *kind, *text;
  if (!PyArg_ParseTuple(args, "ss", &kind, &text)) return NULL;
  job_tell(kind, text, strlen(text));
  return PyBool_FromLong(job_has_folder());
}

/* Return how many operations have failed so far. */
static PyObject *failures(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  return PyLong_FromLong(atomic_load(&runtime.failures));
}

/* Name on stderr the requests that were never waited for, and complete reductions in Python, for some seconds. Return
 * how many of these are still under way. */
static PyObject *finish_requests(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  PyThreadState *state = PyEval_SaveThread();
  int64_t under_way = requests_finish();
  PyEval_RestoreThread(state);
  return PyLong_FromLongLong(under_way);
}

/* Return how many operations have been started and not waited for. */
static PyObject *in_flight(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  PyThreadState *state = PyEval_SaveThread(); /* a reduction in Python may need the GIL to continue */
  int64_t count = requests_in_flight();
  PyEval_RestoreThread(state);
  return PyLong_FromLongLong(count);
}

static void end_background(void) {
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  agreement_finish();
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  requests_finish();
  nccl_finish();
  transport_finish();
  watchdog_stop();
}

/* Finish the messages of comparisons, the requests (as finish_requests) and the work on devices. From then on report no
 * operation that waits. */
static PyObject *release(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) { return without_gil(end_background); }

/* Record operations from now on in this new file, a descriptor, of at most `limit` bytes. OSError: it cannot be
 * written. */
static PyObject *open_timeline(PyObject *Py_UNUSED(self), PyObject *args) {
  int file;
  long long limit;
  if (!PyArg_ParseTuple(args, "iL", &file, &limit)) return NULL;
  if ((errno = timeline_open(file, limit)) != 0) return PyErr_SetFromErrno(PyExc_OSError);
  Py_RETURN_NONE;
}

/* Write a line into the timeline's file. */
static PyObject *note_in_timeline(PyObject *Py_UNUSED(self), PyObject *args) {
  const char *line;
  if (!PyArg_ParseTuple(args, "s", &line)) return NULL;
  timeline_note(line);
  Py_RETURN_NONE;
}

/* Write the rest of the timeline, if there is one. */
static PyObject *close_timeline(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
  return without_gil(timeline_close);
}

PyMethodDef observe_methods[] = {
    {"add_site", add_site, METH_VARARGS, NULL},
    {"enter", enter, METH_VARARGS, NULL},
    {"leave", leave, METH_O, NULL},
    {"take_failure", take_failure, METH_NOARGS, NULL},
    {"write_job_file", write_job_file, METH_VARARGS, NULL},
    {"failures", failures, METH_NOARGS, NULL},
    {"release", release, METH_NOARGS, NULL},
    {"finish_requests", finish_requests, METH_NOARGS, NULL},
    {"requests_in_flight", in_flight, METH_NOARGS, NULL},
    {"open_timeline", open_timeline, METH_VARARGS, NULL},
    {"note_in_timeline", note_in_timeline, METH_VARARGS, NULL},
    {"close_timeline", close_timeline, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
