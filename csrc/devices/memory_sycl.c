/* Intel's devices, through SYCL's library, which JAX's plugin for them brings. XLA's stream is a sycl::queue, in order.
 *
 * The library is written in C++. We call the functions by their mangled names (sycl.def), and an exception becomes an
 * error (exceptions.h). We look for the library at the first call, when JAX has loaded the plugin, and only among the
 * libraries of this process.
 *
 * No function that both versions of the library have takes work of the host. So nothing is left to a stream, and the
 * thread of the call waits (TRANSPORT_WAIT). No function copies several rows: we copy them one by one.
 *
 * A context is a queue of XLA's. From it we make memory and further queues.
 *
 * Threads: as in base/memory.h. contexts_lock is held for a moment, and so is the lock of an event.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/memory.h"
#include "base/symbols.h"
#include "devices/exceptions.h"
#include "devices/spaces.h"
#include "devices/transport.h"

/* A sycl::queue, event or context is a std::shared_ptr, and in libsycl.so.8 a device is, too. In libsycl.so.9 a device
 * is a pointer alone: behind it `counted` keeps the zeros that we put there, so that nothing is released. */
struct shared {
  void *implementation;
  struct counted { /* of libstdc++ */
    void (**functions)(struct counted *);
    atomic_int uses, weak;
  } *counted;
};

/* Memory in which the library makes an object. */
typedef union {
  struct shared shared;
  _Alignas(16) char room[256];
} object;

/* A std::vector of events. */
struct events {
  const struct shared *begin, *end, *room;
};

/* A sycl::detail::code_location, which the library's own reports show: an empty one. */
static const char nowhere[64];

static struct sycl {
#define FUNCTION(name, shown, symbol, result, parameters) result(*name) parameters;
#include "devices/sycl.def"
#undef FUNCTION
} sycl;

/* Our error codes: the library has none. */
enum { THROWN = 1, NO_MEMORY = 2, NOT_FOUND = 3 };

/* --- the library --- */

static char not_found[512]; /* why the library cannot be used; empty: it can, or nobody has looked for it */

static void *find_library(const char **name) {
  static const char *const names[] = {"libsycl.so.9", "libsycl.so.8"};
  void *loaded = NULL, *library;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if ((library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD)) == NULL) continue;
    if (loaded != NULL) {
      snprintf(not_found, sizeof not_found,
               "this process has both libsycl.so.9 and libsycl.so.8, and nobody says to "
               "which a stream belongs: leave one of them out of LD_LIBRARY_PATH");
      return NULL;
    }
    loaded = library;
    *name = names[i];
  }
  if (loaded == NULL)
    snprintf(not_found, sizeof not_found,
             "this process has neither libsycl.so.8 nor libsycl.so.9, which jaxmpi knows: install a "
             "jax-oneapi-plugin[with-oneapi] that brings one of them");
  return loaded;
}

static void load(void) {
  static const struct symbol symbols[] = {
#define FUNCTION(name, shown, symbol, result, parameters) {#symbol, offsetof(struct sycl, name), true},
#include "devices/sycl.def"
#undef FUNCTION
      {NULL, 0, false}};
  const char *name = "";
  void *library = find_library(&name);
  if (library == NULL) return;
  const char *missing = symbols_load(library, symbols, &sycl);
  if (missing == NULL) missing = exceptions_load(library);
  if (missing != NULL)
    snprintf(not_found, sizeof not_found, "%s has no %s: install another version of jax-oneapi-plugin[with-oneapi]",
             name, missing);
}

/* --- calls --- */

static _Thread_local char thrown[256]; /* the text of the last exception */

/* Call a function of the library with the arguments of a structure. Return 0 or THROWN. `shown`: the name in errors. */
static int guard(const char *shown, void (*function)(void *), void *arguments) {
  const struct exception_class class = {"N4sycl3_V19exceptionE", sycl.exception_what};
  bool has_thrown = exceptions_catch(function, arguments, &class, thrown, sizeof thrown);
  return memory_checked(shown, has_thrown ? THROWN : 0);
}

/* The arguments and results of all functions; each uses some members. */
struct arguments {
  void *queue, *to;
  const void *from;
  size_t bytes;
  struct shared *event;
  object *made, *context, *device;
};

#define FUNCTION(name, shown, symbol, result, parameters) static const char name##_shown[] = shown;
#include "devices/sycl.def"
#undef FUNCTION
#define GUARDED(name, ...)              \
  static void name##_call(void *data) { \
    struct arguments *a = data;         \
    __VA_ARGS__;                        \
  }
GUARDED(queue_memcpy, sycl.queue_memcpy(a->made, a->queue, a->to, a->from, a->bytes, nowhere))
GUARDED(queue_memset, sycl.queue_memset(a->made, a->queue, a->to, 0, a->bytes, nowhere))
GUARDED(queue_wait, sycl.queue_wait(a->queue, nowhere))
GUARDED(queue_barrier, sycl.queue_barrier(a->made, a->queue, nowhere))
GUARDED(queue_barrier_after, struct events one = {a->event, a->event + 1, a->event + 1};
        sycl.queue_barrier_after(a->made, a->queue, &one, nowhere))
GUARDED(queue_context, sycl.queue_context(a->context, a->queue))
GUARDED(queue_device, sycl.queue_device(a->device, a->queue))
GUARDED(queue_properties, a->from = sycl.queue_properties(a->queue))
GUARDED(queue_make, sycl.queue_make(a->made, a->context, a->device, a->from))
GUARDED(event_wait, sycl.event_wait(a->event))
GUARDED(malloc_host, a->to = sycl.malloc_host(a->bytes, a->queue, nowhere))
GUARDED(free_host, sycl.free_host(a->to, a->queue, nowhere))
#define CALL(name, arguments) guard(name##_shown, name##_call, arguments)

/* The copy constructor and the destructor of a shared_ptr. */
static struct shared share(const struct shared *shared) {
  if (shared->counted != NULL) atomic_fetch_add(&shared->counted->uses, 1);
  return *shared;
}

static void release(struct shared *shared) {
  enum { DISPOSE = 2, DESTROY = 3 }; /* places in the table of virtual functions */
  struct counted *counted = shared->counted;
  *shared = (struct shared){NULL, NULL};
  if (counted == NULL || atomic_fetch_sub(&counted->uses, 1) != 1) return;
  counted->functions[DISPOSE](counted);
  if (atomic_fetch_sub(&counted->weak, 1) == 1) counted->functions[DESTROY](counted);
}

/* --- contexts --- */

/* A queue of XLA's, which we share and never release: XLA may destroy the queue before our memory is freed. */
static struct kept {
  struct kept *next;
  struct shared queue;
} *contexts;
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;

/* Find or make the context of a queue. Under contexts_lock. */
static int context_of(const struct shared *queue, void **result) {
  struct kept *kept = contexts;
  while (kept != NULL && kept->queue.implementation != queue->implementation) kept = kept->next;
  if (kept == NULL) {
    if ((kept = malloc(sizeof *kept)) == NULL) return memory_checked("malloc", NO_MEMORY);
    *kept = (struct kept){contexts, share(queue)};
    contexts = kept;
  }
  *result = &kept->queue;
  return 0;
}

static int context(void *stream, void **result) {
  static bool tried;
  pthread_mutex_lock(&contexts_lock);
  if (!tried) load();
  tried = true;
  int code = *not_found == '\0' ? context_of(stream, result) : memory_checked("loading SYCL", NOT_FOUND);
  pthread_mutex_unlock(&contexts_lock);
  return code;
}

static _Thread_local struct shared *entered; /* the context of this thread */

static int enter(void *context, void **previous) {
  *previous = entered;
  entered = context;
  return 0;
}

static int leave(void *previous) {
  entered = previous;
  return 0;
}

/* Count the GPUs that Level Zero shows to this process; 0 without Level Zero. */
static int count(int *devices) {
  enum { GPU_ONLY = 1, MOST_DRIVERS = 16 };
  struct {
    int (*zeInit)(unsigned), (*zeDriverGet)(uint32_t *, void **), (*zeDeviceGet)(void *, uint32_t *, void *);
  } ze;
  static const struct symbol symbols[] = {{"zeInit", 0, true},
                                          {"zeDriverGet", sizeof(void *), true},
                                          {"zeDeviceGet", 2 * sizeof(void *), true},
                                          {NULL, 0, false}};
  void *library = dlopen("libze_loader.so.1", RTLD_LAZY), *drivers[MOST_DRIVERS];
  uint32_t driver_count = MOST_DRIVERS;
  *devices = 0;
  if (library == NULL || symbols_load(library, symbols, &ze) != NULL) return 0;
  if (ze.zeInit(GPU_ONLY) != 0 || ze.zeDriverGet(&driver_count, drivers) != 0) return 0;
  for (uint32_t i = 0; i < driver_count; i++) {
    uint32_t device_count = 0;
    if (ze.zeDeviceGet(drivers[i], &device_count, NULL) == 0) *devices += (int)device_count;
  }
  return 0;
}

/* --- memory --- */

static int pin(void **host, size_t bytes) {
  struct arguments a = {.queue = entered, .bytes = bytes};
  int code = CALL(malloc_host, &a);
  *host = a.to;
  return code != 0 || a.to != NULL ? code : memory_checked(malloc_host_shown, NO_MEMORY);
}

static int unpin(void *host) { return CALL(free_host, (&(struct arguments){.queue = entered, .to = host})); }

static int copy(void *to, const void *from, size_t bytes, void *stream) {
  object event;
  struct arguments a = {.queue = stream, .to = to, .from = from, .bytes = bytes, .made = &event};
  int code = CALL(queue_memcpy, &a);
  if (code == 0) release(&event.shared);
  return code;
}

static int copy_down(void *host, const void *device, struct rows rows, void *stream) {
  int code = 0;
  for (size_t i = 0; i < rows.count && code == 0; i++)
    code =
        copy((char *)host + i * rows.on_host, (const char *)device + (ptrdiff_t)i * rows.on_device, rows.width, stream);
  return code;
}

static int copy_up(void *device, const void *host, struct rows rows, void *stream) {
  int code = 0;
  for (size_t i = 0; i < rows.count && code == 0; i++)
    code =
        copy((char *)device + (ptrdiff_t)i * rows.on_device, (const char *)host + i * rows.on_host, rows.width, stream);
  return code;
}

static int zero(void *device, size_t bytes, void *stream) {
  object event;
  int code = CALL(queue_memset, (&(struct arguments){.queue = stream, .to = device, .bytes = bytes, .made = &event}));
  if (code == 0) release(&event.shared);
  return code;
}

/* --- streams --- */

/* Make a queue like XLA's: of the same context and device, and in order. */
static int stream_make(void **stream) {
  object context = {{NULL, NULL}}, device = {{NULL, NULL}};
  struct arguments a = {.queue = entered, .context = &context, .device = &device, .made = calloc(1, sizeof(object))};
  if (a.made == NULL) return memory_checked("calloc", NO_MEMORY);
  int code = CALL(queue_properties, &a);
  if (code == 0 && (code = CALL(queue_context, &a)) == 0) {
    if ((code = CALL(queue_device, &a)) == 0) {
      code = CALL(queue_make, &a);
      release(&device.shared);
    }
    release(&context.shared);
  }
  if (code != 0) return free(a.made), code;
  *stream = a.made;
  return 0;
}

static int stream_free(void *stream) {
  release(stream);
  free(stream);
  return 0;
}

static int stream_synchronize(void *stream) { return CALL(queue_wait, (&(struct arguments){.queue = stream})); }

/* --- events --- */

/* The library makes a new event at each record: the latest one counts. One thread may record while another waits. */
struct event {
  pthread_mutex_t lock;
  struct shared latest;
};

static int event_make(void **result) {
  struct event *event = calloc(1, sizeof *event);
  if (event == NULL) return memory_checked("calloc", NO_MEMORY);
  pthread_mutex_init(&event->lock, NULL);
  *result = event;
  return 0;
}

static int event_free(void *data) {
  struct event *event = data;
  release(&event->latest);
  pthread_mutex_destroy(&event->lock);
  free(event);
  return 0;
}

/* For XLA's queues, which measure times (property::queue::enable_profiling), the library makes a barrier here. For
 * another queue in order libsycl.so.8 may return the event of an earlier copy. */
static int event_record(void *data, void *stream) {
  struct event *event = data;
  object barrier;
  int code = CALL(queue_barrier, (&(struct arguments){.queue = stream, .made = &barrier}));
  if (code != 0) return code;
  pthread_mutex_lock(&event->lock);
  struct shared before = event->latest;
  event->latest = barrier.shared;
  pthread_mutex_unlock(&event->lock);
  release(&before);
  return 0;
}

static struct shared latest_of(struct event *event) {
  pthread_mutex_lock(&event->lock);
  struct shared latest = share(&event->latest);
  pthread_mutex_unlock(&event->lock);
  return latest;
}

static int event_synchronize(void *event) {
  struct shared latest = latest_of(event);
  int code = latest.implementation != NULL ? CALL(event_wait, (&(struct arguments){.event = &latest})) : 0;
  release(&latest);
  return code;
}

static int stream_wait(void *stream, void *event) {
  object barrier;
  struct shared latest = latest_of(event);
  struct arguments a = {.queue = stream, .event = &latest, .made = &barrier};
  int code = latest.implementation != NULL ? CALL(queue_barrier_after, &a) : 0;
  if (code == 0 && latest.implementation != NULL) release(&barrier.shared);
  release(&latest);
  return code;
}

static void text(int code, const char **name, const char **words) {
  static const char *const names[] = {[THROWN] = "an exception", [NO_MEMORY] = "no memory", [NOT_FOUND] = "not found"};
  *name = names[code];
  *words = code == THROWN ? thrown : code == NO_MEMORY ? "out of memory" : not_found;
}

#define MEMORY memory_sycl
#include "execute/handlers.h"

const struct memory memory_sycl = {
    .platform = "ONEAPI",
#if !defined __x86_64__ || !defined __linux__
    .absent = "jaxmpi reaches Intel's devices on Linux with x86-64 processors alone",
#endif
    .handlers = handlers,
    .run = transport_run,
    MEMORY_FUNCTIONS,
};
