/* Where the Python program is. The watchdog's thread asks for it, but cannot wait for the GIL: the thread that holds
 * the GIL may be the one that hangs. So another thread of ours waits for the GIL, and asks Python.
 *
 * If there is no answer within a moment, a thread holds the GIL in a call that does not return. Then the frames of
 * Python's main thread are read as the faulthandler reads them: no frame and no thread state can end without the GIL.
 * The state of the main thread exists as long as Python does. The states of other threads may be gone at any time, also
 * that of the thread that imported the package.
 */
#define _GNU_SOURCE
#include "python/methods.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"
#include "observe/watchdog.h"

enum { PLACE_SIZE = 512, DUMP_SIZE = 1 << 14, STEPS = 20, MOST_PACKAGES = 8, STEP_NANOSECONDS = 10000000 };

static PyObject *ask;                     /* Python's function that answers */
static char *own_packages[MOST_PACKAGES]; /* prefixes of files that are not the program's; NULL at the end */
static _Atomic(PyThreadState *) main_thread;
static char answer[PLACE_SIZE];
static atomic_int state; /* 0: idle, 1: asked, 2: answered */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t come;
  bool waits; /* for an answer */
} question = {.lock = PTHREAD_MUTEX_INITIALIZER, .come = PTHREAD_COND_INITIALIZER};

/* The interpreter calls this in the main thread, soon after it was asked to. */
static int note_main_thread(void *Py_UNUSED(unused)) {
  atomic_store(&main_thread, PyThreadState_Get());
  return 0;
}

static void *answer_questions(void *unused) {
  for (;;) {
    pthread_mutex_lock(&question.lock);
    while (!question.waits) pthread_cond_wait(&question.come, &question.lock);
    question.waits = false;
    pthread_mutex_unlock(&question.lock);
    PyGILState_STATE own = PyGILState_Ensure(); /* while Python ends, this ends the thread */
    PyObject *text = PyObject_CallNoArgs(ask), *bytes = text != NULL ? PyUnicode_AsUTF8String(text) : NULL;
    const char *characters = bytes != NULL ? PyBytes_AsString(bytes) : NULL;
    snprintf(answer, sizeof answer, "%s", characters != NULL ? characters : "");
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    PyErr_Clear();
    PyGILState_Release(own);
    atomic_store(&state, 2);
  }
  return unused;
}

static bool ask_python(char *text, size_t size) {
  if (atomic_exchange(&state, 1) == 1) return false; /* the previous question has no answer yet */
  pthread_mutex_lock(&question.lock);
  question.waits = true;
  pthread_cond_signal(&question.come);
  pthread_mutex_unlock(&question.lock);
  for (int i = 0; i < STEPS; i++) {
    nanosleep(&(struct timespec){0, STEP_NANOSECONDS}, NULL);
    if (atomic_load(&state) != 2) continue;
    snprintf(text, size, "%s", answer);
    atomic_store(&state, 0);
    return true;
  }
  return false;
}

static bool is_own(const char *file) {
  for (int i = 0; i < MOST_PACKAGES && own_packages[i] != NULL; i++)
    if (strncmp(file, own_packages[i], strlen(own_packages[i])) == 0) return true;
  return false;
}

/* Open a file without a name; -1 if there is none. */
static int nameless_file(void) {
#ifdef __linux__
  return memfd_create("jaxmpi", MFD_CLOEXEC);
#else
  char name[] = P_tmpdir "/jaxmpi-XXXXXX";
  int file = mkstemp(name);
  if (file >= 0) unlink(name);
  return file;
#endif
}

/* Read the innermost frame of the program. The faulthandler writes lines like `  File "name", line 12 in function`,
 * the innermost call first. */
static void read_frames(char *text, size_t size) {
  void (*dump)(int, PyThreadState *), *symbol = dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  int file = nameless_file();
  static char lines[DUMP_SIZE];
  PyThreadState *of_main = atomic_load(&main_thread);
  if (symbol != NULL && file >= 0 && of_main != NULL) {
    memcpy(&dump, &symbol, sizeof symbol);
    dump(file, of_main);
    ssize_t length = pread(file, lines, sizeof lines - 1, 0);
    lines[length > 0 ? length : 0] = '\0';
    char *rest = lines;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
      char name[PLACE_SIZE], function[PLACE_SIZE];
      int number;
      if (sscanf(line, "  File \"%500[^\"]\", line %d in %500s", name, &number, function) != 3 || is_own(name))
        continue;
      snprintf(text, size, "%.300s:%d (%.100s)", name, number, function);
      break;
    }
  }
  if (file >= 0) close(file);
}

static void find_call_site(char *text, size_t size) {
  if (!ask_python(text, size)) read_frames(text, size);
}

/* watch(seconds, action, where, packages): report an operation that waits longer, from now on; with `action` 1 the job
 * ends. `where` returns the line of the program, and is called in another thread. Files whose names begin with one of
 * `packages`, at most 8, are not the program's. The main thread calls it as it imports the package. */
static PyObject *watch(PyObject *Py_UNUSED(self), PyObject *args) {
  double seconds;
  int action;
  PyObject *where, *packages;
  if (!PyArg_ParseTuple(args, "diOO!", &seconds, &action, &where, &PyTuple_Type, &packages)) return NULL;
  Py_INCREF(where);
  ask = where;
  for (int i = 0; i < MOST_PACKAGES && i < PyTuple_Size(packages); i++) {
    PyObject *bytes = PyUnicode_EncodeFSDefault(PyTuple_GetItem(packages, i));
    own_packages[i] = bytes != NULL ? strdup(PyBytes_AsString(bytes)) : NULL;
    Py_XDECREF(bytes);
    if (own_packages[i] == NULL) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
  }
  if (seconds > 0) {
    pthread_t thread;
    if (thread_start(&thread, answer_questions) != 0) return PyErr_NoMemory();
    pthread_detach(thread);
    Py_AddPendingCall(note_main_thread, NULL);
  }
  watchdog_configure(seconds, (enum action)action, find_call_site);
  Py_RETURN_NONE;
}

PyMethodDef call_site_methods[] = {{"watch", watch, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
