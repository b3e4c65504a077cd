/* Settings of the process and of a communicator. Called under the GIL. */
#include "python/helpers.h"

#include <stddef.h>
#include <string.h>

#include "core/registry.h"
#include "python/methods.h"

/* How a setting is stored. Python has checked the values that users choose. */
enum setting_kind {
  SETTING_BOOL,         /* bool */
  SETTING_ATOMIC_BOOL,  /* atomic_bool */
  SETTING_INT,          /* int */
  SETTING_INT64,        /* int64_t */
  SETTING_ATOMIC_INT64, /* _Atomic int64_t */
  SETTING_OBJECT,       /* the object with a number in the registry */
  SETTING_TRANSPORT,    /* the name of a transport */
  SETTING_TEXT          /* const char *_Atomic, a copy that stays for ever */
};

struct setting {
  const char *name; /* NULL at the end of a table */
  size_t offset;    /* of the member */
  enum setting_kind kind;
};

#define OF(type, name, kind) {#name, offsetof(struct type, name), SETTING_##kind}
static const struct setting of_process[] = {
    OF(runtime, rank, INT),       /* in COMM_WORLD */
    OF(runtime, serialize, BOOL), /* MPI allows one call at a time */
    OF(runtime, self, OBJECT),    /* COMM_SELF */
    OF(runtime, world, OBJECT),   /* COMM_WORLD */
    OF(runtime, most_tag, INT),   /* the highest tag of a message */
    OF(runtime, failed, INT),     /* classes of errors that report the death of a process; 0: none */
    OF(runtime, pending, INT),
    OF(runtime, revoked, INT),
    OF(runtime, max_count, INT64),             /* elements that one MPI call may get; a test lowers it */
    OF(runtime, aware, BOOL),                  /* MPI reaches the memory of devices */
    OF(runtime, transport, TRANSPORT),         /* for memory that MPI does not reach */
    OF(runtime, flags_asked, BOOL),            /* the transport `flags`, or an error */
    OF(runtime, several_devices, ATOMIC_BOOL), /* whether a link is bound to a device must be checked */
    OF(runtime, several_threads, ATOMIC_BOOL), /* more than one thread of the program communicates */
    OF(runtime, check, ATOMIC_BOOL),           /* the ranks compare all their collectives; the same on all ranks */
    OF(runtime, labels, ATOMIC_BOOL),          /* messages have labels; the same on all ranks */
    OF(runtime, channel, INT64),               /* a duplicate of COMM_WORLD for comparisons; 0: there is none */
    OF(runtime, ends_on_error, ATOMIC_BOOL),   /* an operation that fails ends the job and does not raise */
    OF(runtime, log, ATOMIC_BOOL),             /* a line on stderr at the start and at the end of an operation */
    {NULL, 0, SETTING_BOOL},
};

static const struct setting of_communicator[] = {
    OF(communicator, chunk, ATOMIC_INT64),
    OF(communicator, piece, ATOMIC_INT64),
    OF(communicator, name, TEXT),
    OF(communicator, by_nccl, ATOMIC_BOOL),
    {NULL, 0, SETTING_BOOL},
};

static const char *const transports[] = {
    [TRANSPORT_CALLBACK] = "callback", [TRANSPORT_FLAGS] = "flags", [TRANSPORT_WAIT] = "wait", NULL};

/* Return the current value of a setting, for those that a test sets back; otherwise None. */
static PyObject *setting_get(const struct setting *setting, const void *member) {
  switch (setting->kind) {
    case SETTING_ATOMIC_BOOL:
      return PyBool_FromLong(atomic_load((const atomic_bool *)member));
    case SETTING_INT64:
      return PyLong_FromLongLong(*(const int64_t *)member);
    case SETTING_ATOMIC_INT64:
      return PyLong_FromLongLong(atomic_load((const _Atomic int64_t *)member));
    default:
      Py_RETURN_NONE;
  }
}

static int fail_value(const struct setting *setting, const char *why) {
  PyErr_Format(PyExc_ValueError, "%s: %s", setting->name, why);
  return -1;
}

static int set_integer(const struct setting *setting, void *member, long long value) {
  switch (setting->kind) {
    case SETTING_BOOL:
      *(bool *)member = value != 0;
      break;
    case SETTING_ATOMIC_BOOL:
      atomic_store((atomic_bool *)member, value != 0);
      break;
    case SETTING_INT:
      *(int *)member = (int)value;
      break;
    case SETTING_ATOMIC_INT64:
      atomic_store((_Atomic int64_t *)member, value);
      break;
    case SETTING_OBJECT:
      if ((*(void **)member = registry_at(value)) == NULL) return fail_value(setting, "no object has this number");
      break;
    default:
      *(int64_t *)member = value;
  }
  return 0;
}

static int set_text(const struct setting *setting, void *member, const char *text) {
  if (setting->kind == SETTING_TRANSPORT) {
    int number = 0;
    while (transports[number] != NULL && strcmp(transports[number], text) != 0) number++;
    if (transports[number] == NULL) return fail_value(setting, "no transport has this name");
    *(enum transport *)member = (enum transport)number;
    return 0;
  }
  char *copy = strdup(text); /* never freed: the watchdog may be reading the previous one */
  if (copy == NULL) return PyErr_NoMemory(), -1;
  for (char *c = copy; *c != '\0'; c++) /* a report is one line, and the launcher reads it as one */
    if ((unsigned char)*c < ' ' || *c == 127) *c = ' ';
  atomic_store((const char *_Atomic *)member, copy);
  return 0;
}

/* Return 0; -1 with an exception set. */
static int setting_set(const struct setting *setting, void *member, PyObject *value) {
  if (setting->kind == SETTING_TRANSPORT || setting->kind == SETTING_TEXT) {
    PyObject *bytes = PyUnicode_AsUTF8String(value);
    int code = bytes != NULL ? set_text(setting, member, PyBytes_AsString(bytes)) : -1;
    Py_XDECREF(bytes);
    return code;
  }
  bool is_truth = setting->kind == SETTING_BOOL || setting->kind == SETTING_ATOMIC_BOOL;
  long long number = is_truth ? PyObject_IsTrue(value) : PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return -1;
  return set_integer(setting, member, number);
}

/* Set the settings that the keywords name. Return the previous values. */
static PyObject *apply_settings(const struct setting *table, void *of, PyObject *keywords) {
  PyObject *before = PyDict_New(), *key, *value;
  Py_ssize_t at = 0;
  while (before != NULL && keywords != NULL && PyDict_Next(keywords, &at, &key, &value)) {
    const struct setting *setting = table;
    while (setting->name != NULL && PyUnicode_CompareWithASCIIString(key, setting->name) != 0) setting++;
    if (setting->name == NULL) PyErr_Format(PyExc_TypeError, "no setting is called %U", key);
    void *member = (char *)of + setting->offset;
    if (setting->name == NULL || dict_put(before, setting->name, setting_get(setting, member)) < 0 ||
        setting_set(setting, member, value) < 0)
      Py_CLEAR(before);
  }
  return before;
}

/* Return {name: the value before}. Set settings of the process: see csrc/python/settings.c. Settings that are not
 * atomic are set before the first operation, or by a test between two. */
static PyObject *configure(PyObject *Py_UNUSED(self), PyObject *args, PyObject *keywords) {
  if (!PyArg_ParseTuple(args, "")) return NULL;
  return apply_settings(of_process, &runtime, keywords);
}

/* Return {name: the value before}. `chunk`: bytes of a chunk, for operations that may go in chunks; 0: in one. `piece`:
 * bytes of a piece of a long allreduce; 0: never divided. Both must be the same on all ranks of the communicator.
 * `by_nccl`: NCCL carries what it can, on all ranks of the communicator or on none.
 * `name`: for reports. */
static PyObject *configure_communicator(PyObject *Py_UNUSED(self), PyObject *args, PyObject *keywords) {
  long long number;
  if (!PyArg_ParseTuple(args, "L", &number)) return NULL;
  struct communicator *comm = communicator_at(number);
  return comm != NULL ? apply_settings(of_communicator, comm, keywords) : NULL;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void)) function, METH_VARARGS | METH_KEYWORDS
PyMethodDef settings_methods[] = {
    {"configure", KEYWORDS(configure), NULL},
    {"configure_communicator", KEYWORDS(configure_communicator), NULL},
    {NULL, NULL, 0, NULL},
};
