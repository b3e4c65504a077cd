/* The driver whose rules are in fake_driver.h: the simulation, and at the end the functions of each interface.
 *
 * One lock guards everything except the content of memory. A function of the interface takes it in `begin` and releases
 * it in `end`; the functions that it calls in between expect it to be held. */
#define _GNU_SOURCE
#include "fake_driver.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef FAKE_SYCL /* has no host functions, no values that streams await, and no copies of rows */
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#define EXPORT __attribute__((visibility("default")))

static struct fake_driver driver;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER; /* a stream or the callback thread may have something to do */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER; /* an operation is done */

/* Of the calling thread. In the static block, since LeakSanitizer crashes on a thread that has a block of its own for
 * a library that was opened later. */
#define PER_THREAD static _Thread_local __attribute__((tls_model("initial-exec")))
PER_THREAD const char *function = ""; /* of the interface, which it is in */
PER_THREAD bool in_callback;
#if defined FAKE_HIP
PER_THREAD int device_now;
static int current_device(void) { return device_now; }
#elif defined FAKE_SYCL
static int current_device(void) { return driver.device; } /* a queue belongs to a device, and a thread to none */
#else
enum { CONTEXTS = 8, DEPTH = 16 };
static char contexts[CONTEXTS]; /* of devices; its address is all there is to one */
PER_THREAD int depth;
PER_THREAD int entered[DEPTH]; /* devices, of the last contexts: a test may let leaving fail again and again */
static int current_device(void) { return depth > 0 ? entered[(depth - 1) % DEPTH] : 0; }
#endif

__attribute__((format(printf, 2, 3))) static int violate(int code, const char *format, ...) {
  char text[384];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "fake driver: %s: %s\n", function, text);
  if (driver.violations++ == 0) snprintf(driver.violation, sizeof driver.violation, "%s: %s", function, text);
  return code;
}

/* --- calls: their number, and failures on request --- */

enum { NAMES = 64, FAILURES = 16 };
static struct counted {
  const char *name;
  int calls;
} counted[NAMES];
static struct {
  char name[64];
  int left, code; /* left 0: none */
} failures[FAILURES];

static bool same_name(const char *name, const char *asked) {
  size_t length = strlen(name);
  return strncmp(name, asked, length) == 0 && (asked[length] == '\0' || strcmp(asked + length, "_v2") == 0);
}

static struct counted *count_of(const char *name) {
  struct counted *row = counted;
  while (row->name != NULL && strcmp(row->name, name) != 0) row++;
  row->name = name;
  return row;
}

/* Takes the lock; 0, or the code to return at once. */
static int begin(const char *name, bool in_context) {
  pthread_mutex_lock(&lock);
  function = name;
  count_of(name)->calls++;
  int code = 0;
  for (int i = 0; i < FAILURES; i++)
    if (failures[i].left > 0 && same_name(name, failures[i].name) && --failures[i].left == 0) code = failures[i].code;
  if (in_callback) return violate(FAKE_NOT_PERMITTED, "called from a host function");
#if defined FAKE_HIP || defined FAKE_SYCL
  (void)in_context; /* each thread has a device, or no one needs any */
#else
  if (in_context && depth == 0) return violate(FAKE_INVALID_CONTEXT, "called without a current context");
#endif
  return code;
}

static int end(int code) {
  function = "";
  pthread_mutex_unlock(&lock);
  return code;
}

/* --- memory --- */

/* An allocation. It outlives its memory for as long as operations refer to it. */
struct region {
  struct region *next;
  char *from;  /* as the driver's user sees it */
  char *alias; /* the same memory, accessible; the same address if it is pinned */
  size_t bytes;
  int users;   /* operations that are not done */
  int running; /* of those, the ones that are touching it */
  bool live;
  bool signal; /* HIP: made as a flag */
};
static struct region *pinned_memory, *device_memory;

/* The one that holds all of the range, NULL if there is none. */
static struct region *region_of(struct region *list, const void *address, size_t bytes) {
  for (struct region *r = list; r != NULL; r = r->next) {
    size_t offset = (size_t)((uintptr_t)address - (uintptr_t)r->from);
    if (offset <= r->bytes && bytes <= r->bytes - offset) return r;
  }
  return NULL;
}

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
  return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
}

static int region_add(struct region **list, char *from, char *alias, size_t bytes) {
  struct region *made = malloc(sizeof *made);
  if (made == NULL) return FAKE_OUT_OF_MEMORY;
  *made = (struct region){.next = *list, .from = from, .alias = alias, .bytes = bytes, .live = true};
  *list = made;
  return 0;
}

static void region_leave(struct region *region) {
  if (--region->users == 0 && !region->live) free(region);
}

/* The region that begins there, taken out of the list. */
static struct region *region_take(struct region **list, const void *from) {
  for (struct region **at = list; *at != NULL; at = &(*at)->next)
    if ((*at)->from == from) {
      struct region *found = *at;
      *at = found->next;
      found->live = false;
      found->users++; /* the caller's */
      return found;
    }
  return NULL;
}

static int pin(void **host, size_t bytes, unsigned flags, unsigned known_flags) {
  if (flags & ~known_flags) return violate(FAKE_INVALID_VALUE, "unknown flags %#x", flags);
  if (bytes == 0 || host == NULL) return FAKE_INVALID_VALUE;
  void *memory = NULL;
  if (posix_memalign(&memory, 4096, bytes) != 0) return FAKE_OUT_OF_MEMORY;
  if (region_add(&pinned_memory, memory, memory, bytes) != 0) {
    free(memory);
    return FAKE_OUT_OF_MEMORY;
  }
  memset(memory, FAKE_POISON, bytes);
  driver.live_pinned++;
  driver.pinned_bytes += (int64_t)bytes;
  if (driver.pinned_bytes > driver.most_pinned_bytes) driver.most_pinned_bytes = driver.pinned_bytes;
  *host = memory;
  return 0;
}

static int unpin(void *host) {
  const struct region *found = region_of(pinned_memory, host, 1);
  if (found == NULL || found->from != host)
    return violate(FAKE_INVALID_VALUE, "%p is no live allocation of pinned memory", host);
  if (found->users > 0)
    return violate(FAKE_INVALID_VALUE, "%d operations that are not done use the pinned memory at %p", found->users,
                   host);
  struct region *region = region_take(&pinned_memory, host);
  driver.live_pinned--;
  driver.pinned_bytes -= (int64_t)region->bytes;
  free(region->from);
  region_leave(region);
  return 0;
}

/* Addresses of released device memory, which stay out of reach for a while. */
enum { KEPT = 4096, PAGE = 4096 };
static struct {
  void *from;
  size_t bytes;
} kept[KEPT];
static size_t kept_next;

static size_t pages(size_t bytes) { return bytes == 0 ? PAGE : (bytes + PAGE - 1) / PAGE * PAGE; }

static void *allocate(size_t bytes) {
  size_t mapped = pages(bytes);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *from = mmap(NULL, mapped, PROT_NONE, flags, -1, 0), *result = NULL;
  void *alias = mmap(NULL, mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
  pthread_mutex_lock(&lock);
  if (from != MAP_FAILED && alias != MAP_FAILED && region_add(&device_memory, from, alias, bytes) == 0) {
    driver.live_device++;
    result = from;
  }
  pthread_mutex_unlock(&lock);
  if (result != NULL) return result;
  if (from != MAP_FAILED) munmap(from, mapped);
  if (alias != MAP_FAILED) munmap(alias, mapped);
  return NULL;
}

static void release(void *device) {
  if (device == NULL) return;
  pthread_mutex_lock(&lock);
  function = "release";
  struct region *region = region_take(&device_memory, device);
  if (region == NULL) {
    violate(0, "%p is no live allocation of device memory", device);
  } else {
    if (region->users > 1)
      violate(0, "%d operations that are not done use the device memory at %p", region->users - 1, device);
    while (region->running > 0) pthread_cond_wait(&progress, &lock);
    driver.live_device--;
    size_t mapped = pages(region->bytes);
    munmap(region->alias, mapped);
    if (kept[kept_next].from != NULL) munmap(kept[kept_next].from, kept[kept_next].bytes);
    kept[kept_next].from = device;
    kept[kept_next].bytes = mapped;
    kept_next = (kept_next + 1) % KEPT;
    region_leave(region);
  }
  end(0);
}

/* The accessible address of a range of device memory; NULL if it is not inside one allocation. */
static char *inside(const char *who, const void *device, size_t bytes) {
  pthread_mutex_lock(&lock);
  function = who;
  const struct region *region = region_of(device_memory, device, bytes);
  char *found = region == NULL ? NULL : region->alias + ((const char *)device - region->from);
  if (region == NULL) violate(0, "%zu bytes at %p are not inside one live allocation of device memory", bytes, device);
  end(0);
  return found;
}

static void write_device(void *device, const void *host, size_t bytes) {
  char *to = inside("write", device, bytes);
  if (to != NULL && bytes > 0) memcpy(to, host, bytes);
}

static void read_device(void *host, const void *device, size_t bytes) {
  const char *from = inside("read", device, bytes);
  if (from != NULL && bytes > 0) memcpy(host, from, bytes);
}

static void *reach(const void *pointer) {
  pthread_mutex_lock(&lock);
  const struct region *region = region_of(device_memory, pointer, 1);
  char *found = region == NULL ? (char *)(uintptr_t)pointer : region->alias + ((const char *)pointer - region->from);
  pthread_mutex_unlock(&lock);
  return found;
}

/* --- streams and events --- */

enum kind { COPY_UP, COPY_DOWN, COPY_ACROSS, FILL, MARK, AWAIT, CALLBACK, KERNEL, WRITE_VALUE, AWAIT_VALUE };

struct place {
  struct region *region; /* NULL: not used */
  char *address;         /* as the user sees it */
  size_t pitch;          /* bytes from one row to the next */
};

struct operation {
  struct operation *next;
  enum kind kind;
  const char *function; /* that gave it */
  struct place to, from;
  size_t bytes, rows;    /* rows of so many bytes */
  int value;             /* FILL */
  uint32_t word;         /* WRITE_VALUE, AWAIT_VALUE; the flag is `to` */
  struct stream *before; /* AWAIT: its operations up to */
  uint64_t number;
  void (*call)(void *); /* CALLBACK, KERNEL */
  void *data;
};

/* Never freed, so that what refers to it needs no count; there are few. */
struct stream {
  struct stream *next;
  struct operation *first, **last; /* the first one is under way, or about to be */
  uint64_t given, done;            /* numbers of operations */
  int error;                       /* of an operation; synchronize returns it once */
  bool own;                        /* made through the interface */
  bool blocked, closing;
  int device;
};

struct event {
  struct stream *stream; /* of the latest record; NULL if there is none */
  uint64_t number;
};

/* Handles are places in a table that only grows, so that one that was destroyed is known for ever. They are addresses
 * that nobody can use. */
enum { STREAM, EVENT };
static struct object {
  int kind;
  void *what; /* NULL: destroyed */
} *objects;
static size_t object_count, object_room;
static const uintptr_t FIRST_HANDLE = 0xfa4e00000000, HANDLE_STEP = 16;

static struct stream *streams, *ended; /* with a thread; without */
static int lost;                       /* the code that all work has ended with; 0: the device works */

/* A host function that a stream waits for. */
struct request {
  struct request *next;
  const struct operation *operation;
  bool done;
};
static struct request *requests, **requests_last = &requests;

static void *handle_new(int kind, void *what) {
  if (object_count == object_room) {
    size_t room = object_room == 0 ? 64 : 2 * object_room;
    struct object *grown = realloc(objects, room * sizeof *grown);
    if (grown == NULL) return NULL;
    objects = grown;
    object_room = room;
  }
  objects[object_count] = (struct object){kind, what};
  return (void *)(FIRST_HANDLE + HANDLE_STEP * object_count++);
}

static struct object *handle_find(int kind, const void *handle) {
  uintptr_t offset = (uintptr_t)handle - FIRST_HANDLE;
  const char *name = kind == STREAM ? "stream" : "event";
  if (offset % HANDLE_STEP == 0 && offset / HANDLE_STEP < object_count) {
    struct object *object = &objects[offset / HANDLE_STEP];
    if (object->kind == kind && object->what != NULL) return object;
    if (object->kind == kind) {
      violate(0, "%s %p was destroyed before", name, handle);
      return NULL;
    }
  }
  violate(0, "%p is no %s", handle, name);
  return NULL;
}

static struct stream *stream_of(const void *handle) {
#ifdef FAKE_SYCL
  handle = *(void *const *)handle; /* it is a queue */
#endif
  const struct object *object = handle_find(STREAM, handle);
  return object == NULL ? NULL : object->what;
}

static char *row_of(const struct place *place, size_t i) { return place->address + i * place->pitch; }

/* Whether a row of an operation overlaps the range: then the last one that begins before the range ends does. */
static bool rows_overlap(const struct operation *o, const struct place *place, const char *from, size_t bytes) {
  if (from + bytes <= place->address) return false;
  size_t last = (size_t)(from + bytes - 1 - place->address) / place->pitch;
  return overlap(row_of(place, last < o->rows ? last : o->rows - 1), o->bytes, from, bytes);
}

/* Something that was given before and is not done uses this pinned memory, or may: nobody knows what a host function
 * reads and writes, or whoever a value is awaited from. */
static bool pinned_in_use(const char *host, size_t bytes) {
  for (const struct stream *s = streams; s != NULL; s = s->next)
    for (const struct operation *o = s->first; o != NULL; o = o->next) {
      const struct place *used = o->kind == COPY_UP ? &o->from : o->kind == COPY_DOWN ? &o->to : NULL;
      if (o->kind == CALLBACK || o->kind == KERNEL || o->kind == AWAIT_VALUE ||
          (used != NULL && rows_overlap(o, used, host, bytes)))
        return true;
    }
  return false;
}

/* Gives a copy of `operation` to the stream; its regions are in use from now on. */
static int give(struct stream *stream, const struct operation *operation) {
  if (lost != 0) return lost;
#ifndef FAKE_SYCL
  if (stream->device != current_device())
    return violate(FAKE_INVALID_CONTEXT, "a stream of device %d, and device %d is current", stream->device,
                   current_device());
#endif
  struct operation *given = malloc(sizeof *given);
  if (given == NULL) return FAKE_OUT_OF_MEMORY;
  *given = *operation;
  given->next = NULL;
  given->function = function;
  if (given->to.region != NULL) given->to.region->users++;
  if (given->from.region != NULL) given->from.region->users++;
  for (size_t i = 0; given->kind == COPY_DOWN && i < given->rows; i++)
    if (!pinned_in_use(row_of(&given->to, i), given->bytes)) memset(row_of(&given->to, i), FAKE_POISON, given->bytes);
  *stream->last = given;
  stream->last = &given->next;
  stream->given++;
  pthread_cond_broadcast(&work);
  return 0;
}

static char *accessible(const struct place *place, size_t row) {
  return place->region->alias + (row_of(place, row) - place->region->from);
}

/* Touches the memory of a copy without the lock, which others need meanwhile. */
static void transfer(struct stream *stream, const struct operation *o) {
  struct region *to = o->to.region, *from = o->from.region;
  if (!to->live || (from != NULL && !from->live)) {
    function = o->function;
    stream->error = violate(FAKE_ILLEGAL_ADDRESS, "memory was freed before the operation was done");
    return;
  }
  to->running++;
  if (from != NULL) from->running++;
  pthread_mutex_unlock(&lock);
  if (from == NULL) memset(accessible(&o->to, 0), o->value, o->bytes);
  for (size_t i = 0; from != NULL && i < o->rows; i++) memcpy(accessible(&o->to, i), accessible(&o->from, i), o->bytes);
  pthread_mutex_lock(&lock);
  to->running--;
  if (from != NULL) from->running--;
}

/* The one thread on which all host functions run. */
static void *run_callbacks(void *unused) {
  (void)unused;
  in_callback = true;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (requests == NULL) pthread_cond_wait(&work, &lock);
    struct request *request = requests;
    if ((requests = request->next) == NULL) requests_last = &requests;
    pthread_mutex_unlock(&lock);
    request->operation->call(request->operation->data);
    pthread_mutex_lock(&lock);
    request->done = true;
    pthread_cond_broadcast(&progress);
  }
  return NULL;
}

static _Atomic uint32_t *word_of(const struct operation *o) { return (void *)o->to.address; }

/* This library is built without ThreadSanitizer, which has to be told what its atomic accesses order. */
__attribute__((weak)) void __tsan_acquire(void *address);
__attribute__((weak)) void __tsan_release(void *address);

static void write_value(const struct operation *o) {
  if (__tsan_release != NULL) __tsan_release(word_of(o));
  function = o->function;
  if (atomic_load(word_of(o)) == o->word) violate(0, "the value %u is there already", o->word);
  atomic_store(word_of(o), o->word);
}

/* The value that comes must be the one that is awaited, the least that satisfies the wait. */
static void await_value(struct stream *stream, const struct operation *o) {
  enum { POLL = 20 /* microseconds */ };
  uint32_t value;
  for (int64_t waited = 0; (value = atomic_load(word_of(o))) < o->word && lost == 0; waited += POLL) {
    if (waited > driver.longest_wait) {
      function = o->function;
      stream->error = violate(FAKE_TIMEOUT, "waits for %u, and there is %u", o->word, value);
      return;
    }
    pthread_mutex_unlock(&lock);
    usleep(POLL);
    pthread_mutex_lock(&lock);
  }
  if (__tsan_acquire != NULL) __tsan_acquire(word_of(o));
  function = o->function;
  if (lost == 0 && value != o->word) violate(0, "has waited for %u, and there is %u", o->word, value);
}

static void execute(struct stream *stream, const struct operation *o) {
  struct request request = {.operation = o};
  if (lost != 0) return;
  switch (o->kind) {
    case MARK:
      break;
    case WRITE_VALUE:
      write_value(o);
      break;
    case AWAIT_VALUE:
      await_value(stream, o);
      break;
    case AWAIT:
      while (o->before->done < o->number && lost == 0) pthread_cond_wait(&progress, &lock);
      break;
    case CALLBACK:
      *requests_last = &request;
      requests_last = &request.next;
      pthread_cond_broadcast(&work);
      while (!request.done) pthread_cond_wait(&progress, &lock);
      break;
    case KERNEL:
      pthread_mutex_unlock(&lock);
      o->call(o->data);
      pthread_mutex_lock(&lock);
      break;
    default:
      transfer(stream, o);
  }
}

static void delay(void) {
  static uint32_t state = 2463534242;
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  if (!driver.slow || lost != 0) return;
  useconds_t microseconds = state % 300;
  pthread_mutex_unlock(&lock);
  usleep(microseconds);
  pthread_mutex_lock(&lock);
}

static bool is_held(const struct stream *stream) { return stream->blocked && lost == 0; }

static void *run_stream(void *of) {
  struct stream *stream = of;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (stream->first == NULL ? !stream->closing : is_held(stream)) pthread_cond_wait(&work, &lock);
    struct operation *o = stream->first;
    if (o == NULL) break;
    /* Where an earlier operation did not allow it before. */
    for (size_t i = 0; o->kind == COPY_DOWN && o->to.region->live && i < o->rows; i++)
      memset(row_of(&o->to, i), FAKE_POISON, o->bytes);
    delay();
    while (is_held(stream)) pthread_cond_wait(&work, &lock);
    execute(stream, o);
    if ((stream->first = o->next) == NULL) stream->last = &stream->first;
    stream->done++;
    if (o->to.region != NULL) region_leave(o->to.region);
    if (o->from.region != NULL) region_leave(o->from.region);
    free(o);
    pthread_cond_broadcast(&progress);
  }
  struct stream **at = &streams;
  while (*at != stream) at = &(*at)->next;
  *at = stream->next;
  stream->next = ended;
  ended = stream;
  pthread_mutex_unlock(&lock);
  return NULL;
}

static int start(void *(*run)(void *), void *of) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, run, of) != 0) return FAKE_OUT_OF_MEMORY;
  pthread_detach(thread);
  return 0;
}

static int stream_make(void **handle, bool own, unsigned flags) {
  if (flags & ~1u) return violate(FAKE_INVALID_VALUE, "unknown flags %#x", flags);
  struct stream *made = calloc(1, sizeof *made);
  void *known = made == NULL ? NULL : handle_new(STREAM, made);
  if (known == NULL || start(run_stream, made) != 0) {
    if (known != NULL) handle_find(STREAM, known)->what = NULL;
    free(made);
    return FAKE_OUT_OF_MEMORY;
  }
  made->last = &made->first;
  made->own = own;
  made->device = own ? current_device() : driver.device;
  made->next = streams;
  streams = made;
  if (own) driver.live_streams++;
  *handle = known;
  return 0;
}

static int stream_free(void *handle) {
  struct object *object = handle_find(STREAM, handle);
  if (object == NULL) return FAKE_INVALID_HANDLE;
  struct stream *stream = object->what;
  if (stream->own) driver.live_streams--;
  object->what = NULL;
  stream->closing = true;
  pthread_cond_broadcast(&work);
  return 0;
}

static int stream_finish(void *handle) {
  struct stream *stream = stream_of(handle);
  if (stream == NULL) return FAKE_INVALID_HANDLE;
  uint64_t number = stream->given;
  while (stream->done < number && lost == 0) pthread_cond_wait(&progress, &lock);
  int code = lost != 0 ? lost : stream->error;
  stream->error = 0;
  return code;
}

static int event_make(void **handle, unsigned flags, unsigned known_flags) {
  if (flags & ~known_flags) return violate(FAKE_INVALID_VALUE, "unknown flags %#x", flags);
  struct event *made = calloc(1, sizeof *made);
  void *known = made == NULL ? NULL : handle_new(EVENT, made);
  if (known == NULL) {
    free(made);
    return FAKE_OUT_OF_MEMORY;
  }
  driver.live_events++;
  *handle = known;
  return 0;
}

static int event_free(void *handle) {
  struct object *object = handle_find(EVENT, handle);
  if (object == NULL) return FAKE_INVALID_HANDLE;
  free(object->what);
  object->what = NULL;
  driver.live_events--;
  return 0;
}

static int event_record(void *handle, void *on) {
  const struct object *object = handle_find(EVENT, handle);
  struct stream *stream = stream_of(on);
  if (object == NULL || stream == NULL) return FAKE_INVALID_HANDLE;
  int code = give(stream, &(struct operation){.kind = MARK});
  if (code == 0) *(struct event *)object->what = (struct event){stream, stream->given};
  return code;
}

static int event_finish(void *handle) {
  const struct object *object = handle_find(EVENT, handle);
  if (object == NULL) return FAKE_INVALID_HANDLE;
  struct event event = *(struct event *)object->what;
  if (event.stream == NULL) return 0;
  while (event.stream->done < event.number && lost == 0) pthread_cond_wait(&progress, &lock);
  return lost != 0 ? lost : event.stream->error;
}

static int event_query(void *handle) {
  const struct object *object = handle_find(EVENT, handle);
  if (object == NULL) return FAKE_INVALID_HANDLE;
  struct event event = *(struct event *)object->what;
  if (lost != 0) return lost;
  if (event.stream == NULL) return 0;
  return event.stream->done < event.number ? FAKE_NOT_READY : event.stream->error;
}

static int launch(void *handle, void (*kernel)(void *), void *data) {
  pthread_mutex_lock(&lock);
  function = "launch";
  struct stream *stream = stream_of(handle);
  return end(stream == NULL ? FAKE_INVALID_HANDLE
                            : give(stream, &(struct operation){.kind = KERNEL, .call = kernel, .data = data}));
}

static bool known(const void *pointer, size_t bytes) {
  pthread_mutex_lock(&lock);
  bool found = region_of(device_memory, pointer, bytes) != NULL || region_of(pinned_memory, pointer, bytes) != NULL;
  pthread_mutex_unlock(&lock);
  return found;
}

static int stream_wait(void *handle, void *for_event, unsigned flags) {
  struct stream *stream = stream_of(handle);
  const struct object *object = handle_find(EVENT, for_event);
  if (object == NULL || stream == NULL) return FAKE_INVALID_HANDLE;
  if (flags != 0) return violate(FAKE_INVALID_VALUE, "unknown flags %#x", flags);
  struct event event = *(struct event *)object->what;
  if (event.stream == NULL) return 0;
  return give(stream, &(struct operation){.kind = AWAIT, .before = event.stream, .number = event.number});
}

static int call_host(void *handle, void (*call)(void *), void *data) {
  static bool started;
  struct stream *stream = stream_of(handle);
  if (stream == NULL) return FAKE_INVALID_HANDLE;
  if (call == NULL) return violate(FAKE_INVALID_VALUE, "no function");
  if (!started && start(run_callbacks, NULL) != 0) return FAKE_OUT_OF_MEMORY;
  started = true;
  return give(stream, &(struct operation){.kind = CALLBACK, .call = call, .data = data});
}

/* --- flags --- */

/* The flag must be all of an allocation, or begin it. */
static int give_value(enum kind kind, void *handle, const void *flag, uint32_t word, unsigned flags) {
  struct operation operation = {.kind = kind, .word = word};
  struct stream *stream = stream_of(handle);
  if (stream == NULL) return FAKE_INVALID_HANDLE;
  if (flags != 0) return violate(FAKE_INVALID_VALUE, "flags %#x", flags);
  if (driver.without_flags) return FAKE_NOT_SUPPORTED;
  operation.to = (struct place){region_of(pinned_memory, flag, sizeof word), (char *)(uintptr_t)flag, sizeof word};
  if (operation.to.region == NULL || operation.to.region->from != operation.to.address)
    return violate(FAKE_INVALID_VALUE, "%p is no flag", flag);
#ifdef FAKE_HIP
  if (!operation.to.region->signal) return violate(FAKE_INVALID_VALUE, "%p is no memory of signals", flag);
  if (word > INT32_MAX) return violate(FAKE_INVALID_VALUE, "%u is negative as a signed value", word);
#endif
  return give(stream, &operation);
}

/* --- copies --- */

/* Rows of `width` bytes each. */
static bool find_place(bool on_device, const void *address, size_t pitch, size_t width, size_t rows,
                       struct place *place) {
  size_t bytes = (rows - 1) * pitch + width;
  *place = (struct place){region_of(on_device ? device_memory : pinned_memory, address, bytes),
                          (char *)(uintptr_t)address, pitch};
  if (place->region == NULL)
    violate(0, "%zu bytes at %p are not inside one live allocation of %s memory", bytes, address,
            on_device ? "device" : "pinned");
  return place->region != NULL;
}

static int copy(struct operation operation, const void *to, size_t to_pitch, const void *from, size_t from_pitch,
                void *handle) {
  size_t width = operation.bytes, rows = operation.rows;
  struct stream *stream = stream_of(handle);
  if (stream == NULL) return FAKE_INVALID_HANDLE;
  if (width == 0 || rows == 0) return 0;
  if (!find_place(operation.kind != COPY_DOWN, to, to_pitch, width, rows, &operation.to) ||
      !find_place(operation.kind != COPY_UP, from, from_pitch, width, rows, &operation.from))
    return FAKE_INVALID_VALUE;
  for (size_t i = 0; i < rows; i++)
    if (rows_overlap(&operation, &operation.from, row_of(&operation.to, i), width))
      return violate(FAKE_INVALID_VALUE, "the ranges overlap");
  return give(stream, &operation);
}

static int copy_bytes(enum kind kind, const void *to, const void *from, size_t bytes, void *stream) {
  return copy((struct operation){.kind = kind, .bytes = bytes, .rows = 1}, to, bytes, from, bytes, stream);
}

static int copy_rows(enum kind kind, const void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                     size_t rows, void *stream) {
  if (to_pitch < width || from_pitch < width || to_pitch > INT32_MAX || from_pitch > INT32_MAX)
    return violate(FAKE_INVALID_VALUE, "no pitch for rows of this width");
  return copy((struct operation){.kind = kind, .bytes = width, .rows = rows}, to, to_pitch, from, from_pitch, stream);
}

static int fill(const void *device, int value, size_t bytes, void *handle) {
  struct operation operation = {.kind = FILL, .value = value, .bytes = bytes, .rows = 1};
  struct stream *stream = stream_of(handle);
  if (stream == NULL) return FAKE_INVALID_HANDLE;
  if (bytes == 0) return 0;
  return find_place(true, device, bytes, bytes, 1, &operation.to) ? give(stream, &operation) : FAKE_INVALID_VALUE;
}

/* --- devices and errors --- */

static int devices(const char *visible) {
  const char *all = getenv("FAKE_DEVICES"), *list = getenv(visible);
  long machine = all == NULL ? 1 : strtol(all, NULL, 10);
  if (list == NULL) return (int)machine;
  int count = 0;
  while (*list != '\0') {
    char *rest;
    long number = strtol(list, &rest, 10);
    bool named = strncmp(list, "GPU-", 4) == 0 || strncmp(list, "MIG-", 4) == 0; /* by UUID: known, we suppose */
    if (!named && (rest == list || number < 0 || number >= machine)) break;
    count++;
    list += strcspn(list, ",");
    if (*list == ',') list++;
  }
  return count;
}

#if defined FAKE_HIP
#define MAKER "ROCm"
#elif defined FAKE_SYCL
#define MAKER "SYCL"
#else
#define MAKER "CUDA"
#endif

static const struct error {
  int code;
  const char *cuda, *hip, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "hipSuccess", "no error"},
    {FAKE_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "hipErrorInvalidValue", "invalid argument"},
    {FAKE_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory", "out of memory"},
    {FAKE_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "hipErrorNotInitialized", "initialization error"},
    {FAKE_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "hipErrorNoDevice", "no " MAKER "-capable device is detected"},
    {FAKE_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "hipErrorInvalidDevice", "invalid device ordinal"},
    {FAKE_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "hipErrorInvalidContext", "invalid device context"},
    {FAKE_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "hipErrorInvalidHandle", "invalid resource handle"},
    {FAKE_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "hipErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {FAKE_LAUNCH_FAILURE, "CUDA_ERROR_LAUNCH_FAILED", "hipErrorLaunchFailure", "unspecified launch failure"},
    {FAKE_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "hipErrorLaunchTimeOut", "the launch timed out and was terminated"},
    {FAKE_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "hipErrorNotPermitted", "operation not permitted"},
    {FAKE_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "hipErrorNotSupported", "operation not supported"},
    {FAKE_UNKNOWN, "CUDA_ERROR_UNKNOWN", "hipErrorUnknown", "unknown error"},
};

/* NULL where there is none. */
static const struct error *error_find(int code) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) return &errors[i];
  return NULL;
}

#ifdef FAKE_SYCL

/* Objects of the library: a handle, and a number of uses as libstdc++ counts them. The core calls the functions. */
typedef struct {
  void *handle;
  struct count {
    void (*const *functions)(struct count *);
    atomic_int uses, weak;
    int kind; /* STREAM, EVENT or OTHER */
    void *handle;
  } *counted;
} object;
enum { OTHER = -1 };

/* The last use has ended. */
static void dispose(struct count *counted) {
  pthread_mutex_lock(&lock);
  function = "a destructor";
  if (counted->kind == STREAM)
    stream_free(counted->handle);
  else if (counted->kind == EVENT)
    event_free(counted->handle);
  else
    driver.live_events--;
  end(0);
}

static void destroy(struct count *counted) { free(counted); }

static int object_make(object *made, int kind, void *handle) {
  static void (*const functions[])(struct count *) = {NULL, NULL, dispose, destroy};
  struct count *counted = malloc(sizeof *counted);
  if (counted == NULL) return FAKE_OUT_OF_MEMORY;
  *counted = (struct count){functions, 1, 1, kind, handle};
  *made = (object){handle, counted};
  driver.live_events += kind == OTHER;
  return 0;
}

static void *queue_new(void *handle) {
  object *queue = malloc(sizeof *queue);
  if (queue != NULL) object_make(queue, STREAM, handle);
  return queue;
}

#endif

/* --- control --- */

static void reset(void) {
  pthread_mutex_lock(&lock);
  memset(counted, 0, sizeof counted);
  memset(failures, 0, sizeof failures);
  for (struct stream *s = streams; s != NULL; s = s->next) s->error = 0;
  driver.most_pinned_bytes = driver.pinned_bytes;
  driver.violations = 0;
  driver.violation[0] = '\0';
  end(0);
}

static void fail(const char *name, int nth, int code) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < FAILURES - 1 && failures[i].left > 0) i++;
  snprintf(failures[i].name, sizeof failures[i].name, "%s", name);
  failures[i].left = nth;
  failures[i].code = code;
  end(0);
}

static int calls(const char *name) {
  pthread_mutex_lock(&lock);
  int found = 0;
  for (const struct counted *row = counted; row->name != NULL; row++)
    if (same_name(row->name, name)) found = row->calls;
  return end(found);
}

static int depth_now(void) {
#if defined FAKE_HIP || defined FAKE_SYCL
  return 0;
#else
  return depth;
#endif
}

static void *stream_new(void) {
  void *handle = NULL;
  pthread_mutex_lock(&lock);
  function = "stream";
  stream_make(&handle, false, 0);
#ifdef FAKE_SYCL
  handle = queue_new(handle);
#endif
  end(0);
  return handle;
}

static int synchronize(void *stream) {
  pthread_mutex_lock(&lock);
  function = "synchronize";
  return end(stream_finish(stream));
}

static void block(void *handle, bool on) {
  pthread_mutex_lock(&lock);
  function = "block";
  struct stream *stream = stream_of(handle);
  if (stream != NULL) stream->blocked = on;
  pthread_cond_broadcast(&work);
  end(0);
}

/* All work ends, done or not; with 0 the device works again. */
static void lose(int code) {
  pthread_mutex_lock(&lock);
  lost = code;
  pthread_cond_broadcast(&progress);
  pthread_cond_broadcast(&work);
  for (struct stream *s = streams; s != NULL; s = s->next) {
    while (code != 0 && s->first != NULL) pthread_cond_wait(&progress, &lock);
    if (code == 0) s->error = 0;
  }
  end(0);
}

static struct fake_driver driver = {
    .slow = true,
    .longest_wait = 20000000,
    .lose = lose,
    .reset = reset,
    .fail = fail,
    .calls = calls,
    .depth = depth_now,
    .launch = launch,
    .known = known,
    .allocate = allocate,
    .release = release,
    .stream = stream_new,
    .synchronize = synchronize,
    .write = write_device,
    .read = read_device,
    .reach = reach,
    .block = block,
};

EXPORT struct fake_driver *fake_driver(void) { return &driver; }

__attribute__((constructor)) static void prepare(void) { driver.slow = getenv("FAKE_DRIVER_FAST") == NULL; }

/* --- the interfaces --- */

/* A function of the interface: the lock, the count and the rules for all of them around what this one does. */
#define FUNCTION(name, suffix, parameters, where, expression) \
  EXPORT int name##suffix parameters {                        \
    int code_ = begin(#name, where);                          \
    if (code_ == 0) code_ = (expression);                     \
    return end(code_);                                        \
  }
enum where { ANYWHERE = false, IN_CONTEXT = true };

#if defined FAKE_HIP

static const unsigned host_flags = 0xe000000f, event_flags = 0xe0000007; /* that exist */

static int hip_count(int *count) {
  *count = devices("HIP_VISIBLE_DEVICES");
  return *count > 0 ? 0 : FAKE_NO_DEVICE;
}

static int hip_set(int device) {
  if (device < 0 || device >= devices("HIP_VISIBLE_DEVICES"))
    return violate(FAKE_INVALID_DEVICE, "there is no device %d", device);
  device_now = device;
  return 0;
}

static int hip_device(void *stream, int *device) {
  const struct stream *found = stream_of(stream);
  if (found == NULL) return FAKE_INVALID_HANDLE;
  *device = found->device;
  return 0;
}

static int hip_copy(void *to, const void *from, size_t bytes, int kind, void *stream) {
  static const enum kind kinds[] = {[1] = COPY_UP, [2] = COPY_DOWN, [3] = COPY_ACROSS};
  if (kind < 1 || kind > 3) return violate(FAKE_INVALID_VALUE, "no kind of copy: %d", kind);
  return copy_bytes(kinds[kind], to, from, bytes, stream);
}

static int hip_copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows,
                         int kind, void *stream) {
  static const enum kind kinds[] = {[1] = COPY_UP, [2] = COPY_DOWN};
  if (kind < 1 || kind > 2) return violate(FAKE_INVALID_VALUE, "no kind of copy of rows: %d", kind);
  return copy_rows(kinds[kind], to, to_pitch, from, from_pitch, width, rows, stream);
}

static int hip_attribute(int *value, int attribute, int device) {
  enum { CAN_USE_STREAM_WAIT_VALUE = 10013 };
  if (device != device_now || attribute != CAN_USE_STREAM_WAIT_VALUE)
    return violate(FAKE_INVALID_VALUE, "attribute %d of device %d", attribute, device);
  *value = !driver.without_flags;
  return 0;
}

static int signal_make(void **memory, size_t bytes, unsigned flags) {
  enum { SIGNAL = 2 };
  if (bytes != 8 || flags != SIGNAL) return violate(FAKE_INVALID_VALUE, "%zu bytes, flags %#x", bytes, flags);
  int code = pin(memory, bytes, 0, 0);
  if (code == 0) pinned_memory->signal = true;
  return code;
}

static const char *hip_text(const char *name, int code, bool in_words) {
  const struct error *found = error_find(code);
  if (found == NULL) found = error_find(FAKE_UNKNOWN);
  begin(name, false);
  end(0);
  return in_words ? found->text : found->hip;
}

EXPORT const char *hipGetErrorName(int code) { return hip_text("hipGetErrorName", code, false); }
EXPORT const char *hipGetErrorString(int code) { return hip_text("hipGetErrorString", code, true); }

FUNCTION(hipInit, , (unsigned flags), ANYWHERE, flags != 0 ? FAKE_INVALID_VALUE : hip_count(&(int){0}))
FUNCTION(hipGetDeviceCount, , (int *count), ANYWHERE, hip_count(count))
FUNCTION(hipGetDevice, , (int *device), ANYWHERE, (*device = device_now, 0))
FUNCTION(hipSetDevice, , (int device), ANYWHERE, hip_set(device))
FUNCTION(hipStreamGetDevice, , (void *stream, int *device), ANYWHERE, hip_device(stream, device))

FUNCTION(hipHostMalloc, , (void **host, size_t bytes, unsigned flags), IN_CONTEXT, pin(host, bytes, flags, host_flags))
FUNCTION(hipHostFree, , (void *host), IN_CONTEXT, unpin(host))
FUNCTION(hipDeviceGetAttribute, , (int *value, int attribute, int device), ANYWHERE,
         hip_attribute(value, attribute, device))
FUNCTION(hipExtMallocWithFlags, , (void **memory, size_t bytes, unsigned flags), IN_CONTEXT,
         signal_make(memory, bytes, flags))
FUNCTION(hipFree, , (void *memory), IN_CONTEXT, unpin(memory))
FUNCTION(hipStreamWriteValue32, , (void *stream, void *flag, uint32_t value, unsigned flags), IN_CONTEXT,
         give_value(WRITE_VALUE, stream, flag, value, flags))
FUNCTION(hipStreamWaitValue32, , (void *stream, void *flag, uint32_t value, unsigned flags, uint32_t mask), IN_CONTEXT,
         mask != UINT32_MAX ? violate(FAKE_INVALID_VALUE, "mask %#x", mask)
                            : give_value(AWAIT_VALUE, stream, flag, value, flags))
FUNCTION(hipMemcpyAsync, , (void *to, const void *from, size_t bytes, int kind, void *stream), IN_CONTEXT,
         hip_copy(to, from, bytes, kind, stream))
FUNCTION(hipMemcpy2DAsync, ,
         (void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows, int kind,
          void *stream),
         IN_CONTEXT, hip_copy_rows(to, to_pitch, from, from_pitch, width, rows, kind, stream))
FUNCTION(hipMemsetAsync, , (void *device, int value, size_t bytes, void *stream), IN_CONTEXT,
         fill(device, value, bytes, stream))

FUNCTION(hipEventCreateWithFlags, , (void **event, unsigned flags), IN_CONTEXT, event_make(event, flags, event_flags))
FUNCTION(hipEventDestroy, , (void *event), IN_CONTEXT, event_free(event))
FUNCTION(hipEventRecord, , (void *event, void *stream), IN_CONTEXT, event_record(event, stream))
FUNCTION(hipEventQuery, , (void *event), IN_CONTEXT, event_query(event))
FUNCTION(hipEventSynchronize, , (void *event), IN_CONTEXT, event_finish(event))

FUNCTION(hipStreamCreateWithFlags, , (void **stream, unsigned flags), IN_CONTEXT, stream_make(stream, true, flags))
FUNCTION(hipStreamDestroy, , (void *stream), IN_CONTEXT, stream_free(stream))
FUNCTION(hipStreamWaitEvent, , (void *stream, void *event, unsigned flags), IN_CONTEXT,
         stream_wait(stream, event, flags))
FUNCTION(hipStreamSynchronize, , (void *stream), IN_CONTEXT, stream_finish(stream))
FUNCTION(hipLaunchHostFunc, , (void *stream, void (*call)(void *), void *data), IN_CONTEXT,
         call_host(stream, call, data))

#elif defined FAKE_SYCL

struct events {
  const object *begin, *end, *room;
};

void fake_throw(const char *text);

/* An error is an exception: that of SYCL, or, if there is no memory, another one. */
static void finish_call(int code) {
  if (end(code) == 0) return;
  const struct error *error = error_find(code);
  fake_throw(code == FAKE_OUT_OF_MEMORY ? NULL : error != NULL ? error->text : "unknown error");
}

#define FUNCTION_OF(name, shown, symbol, result, parameters) EXPORT result fake_##name parameters __asm__(#symbol);
#undef FUNCTION
#define FUNCTION       FUNCTION_OF
#define exception_what left_out
#include "devices/sycl.def"
#undef FUNCTION

static char properties, the_device;

/* The event of the work so far. */
static int event_of(object *made, void *queue) {
  void *event = NULL;
  int code = event_make(&event, 0, 0);
  if (code != 0) return code;
  if ((code = event_record(event, queue)) != 0) return event_free(event), code;
  return object_make(made, EVENT, event);
}

static int sycl_copy(void *queue, void *to, const void *from, size_t bytes) {
  bool up = region_of(device_memory, from, bytes) == NULL, down = region_of(device_memory, to, bytes) == NULL;
  return copy_bytes(up ? COPY_UP : down ? COPY_DOWN : COPY_ACROSS, to, from, bytes, queue);
}

static int sycl_queue(object *made, const object *context, const object *device, const void *properties_of) {
  void *stream = NULL;
  if (properties_of != &properties || context->counted->kind != OTHER || device->handle != &the_device)
    return violate(FAKE_INVALID_VALUE, "a queue of something else");
  int code = stream_make(&stream, true, 0);
  return code != 0 ? code : object_make(made, STREAM, stream);
}

void fake_queue_memcpy(object *event, void *queue, void *to, const void *from, size_t bytes, const void *where) {
  (void)where;
  int code = begin("sycl::queue::memcpy", false);
  if (code == 0) code = sycl_copy(queue, to, from, bytes);
  finish_call(code == 0 ? event_of(event, queue) : code);
}

void fake_queue_memset(object *event, void *queue, void *to, int value, size_t bytes, const void *where) {
  (void)where;
  int code = begin("sycl::queue::memset", false);
  if (code == 0) code = fill(to, value, bytes, queue);
  finish_call(code == 0 ? event_of(event, queue) : code);
}

void fake_queue_wait(void *queue, const void *where) {
  (void)where;
  int code = begin("sycl::queue::wait", false);
  finish_call(code == 0 ? stream_finish(queue) : code);
}

void fake_queue_barrier(object *event, void *queue, const void *where) {
  (void)where;
  int code = begin("sycl::queue::ext_oneapi_submit_barrier", false);
  finish_call(code == 0 ? event_of(event, queue) : code);
}

void fake_queue_barrier_after(object *event, void *queue, const struct events *events, const void *where) {
  (void)where;
  int code = begin("sycl::queue::ext_oneapi_submit_barrier(events)", false);
  for (const object *e = events->begin; e != events->end && code == 0; e++) code = stream_wait(queue, e->handle, 0);
  finish_call(code == 0 ? event_of(event, queue) : code);
}

void fake_queue_context(object *context, const void *queue) {
  int code = begin("sycl::queue::get_context", false);
  if (code == 0 && stream_of(queue) == NULL) code = FAKE_INVALID_HANDLE;
  finish_call(code == 0 ? object_make(context, OTHER, NULL) : code);
}

void fake_queue_device(object *device, const void *queue) {
  int code = begin("sycl::queue::get_device", false);
  if (code == 0 && stream_of(queue) == NULL) code = FAKE_INVALID_HANDLE;
  if (code == 0) device->handle = &the_device; /* a pointer alone, as in libsycl.so.9 */
  finish_call(code);
}

const void *fake_queue_properties(const void *queue) {
  int code = begin("sycl::queue::getPropList", false);
  finish_call(code == 0 && stream_of(queue) == NULL ? FAKE_INVALID_HANDLE : code);
  return &properties;
}

void fake_queue_make(void *queue, const object *context, const object *device, const void *properties_of) {
  int code = begin("sycl::queue::queue", false);
  finish_call(code == 0 ? sycl_queue(queue, context, device, properties_of) : code);
}

void fake_event_wait(void *event) {
  int code = begin("sycl::event::wait", false);
  finish_call(code == 0 ? event_finish(((object *)event)->handle) : code);
}

/* No memory is no exception here. */
void *fake_malloc_host(size_t bytes, const void *queue, const void *where) {
  (void)where;
  void *made = NULL;
  int code = begin("sycl::malloc_host", false);
  if (code == 0) code = stream_of(queue) == NULL ? FAKE_INVALID_HANDLE : pin(&made, bytes, 0, 0);
  finish_call(code == FAKE_OUT_OF_MEMORY ? 0 : code);
  return made;
}

void fake_free_host(void *host, const void *queue, const void *where) {
  (void)where;
  int code = begin("sycl::free", false);
  if (code == 0) code = stream_of(queue) == NULL ? FAKE_INVALID_HANDLE : unpin(host);
  finish_call(code);
}

#else

#define POINTER(address) ((void *)(uintptr_t)(address))

static const unsigned host_flags = 0x7, event_flags = 0x7; /* that exist */
static bool initialized;

static int cuda_init(unsigned flags) {
  if (flags != 0) return FAKE_INVALID_VALUE;
  if (devices("CUDA_VISIBLE_DEVICES") == 0) return FAKE_NO_DEVICE;
  initialized = true;
  return 0;
}

static int cuda_count(int *count) {
  if (!initialized) return FAKE_NOT_INITIALIZED;
  *count = devices("CUDA_VISIBLE_DEVICES");
  return 0;
}

static int cuda_context(const void *stream, void **context) {
  const struct stream *found = stream_of(stream);
  if (found == NULL) return FAKE_INVALID_HANDLE;
  *context = &contexts[found->device];
  return 0;
}

static int cuda_device(int *device, int ordinal) {
  if (!initialized) return FAKE_NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= devices("CUDA_VISIBLE_DEVICES")) return FAKE_INVALID_DEVICE;
  *device = ordinal;
  return 0;
}

static int cuda_primary(void **context, int device) {
  if (device < 0 || device >= CONTEXTS) return violate(FAKE_INVALID_DEVICE, "there is no device %d", device);
  *context = &contexts[device];
  return 0;
}

static int cuda_push(const void *context) {
  uintptr_t device = (uintptr_t)context - (uintptr_t)contexts;
  if (device >= CONTEXTS) return violate(FAKE_INVALID_CONTEXT, "%p is no context", context);
  entered[depth++ % DEPTH] = (int)device;
  return 0;
}

static int cuda_pop(void **context) {
  depth--;
  if (context != NULL) *context = &contexts[entered[depth % DEPTH]];
  return 0;
}

static int cuda_text(int code, const char **found, bool in_words) {
  const struct error *error = error_find(code);
  *found = error == NULL ? NULL : in_words ? error->text : error->cuda;
  return error == NULL ? FAKE_INVALID_VALUE : 0;
}

/* Between host and device only. */
static int cuda_copy_rows(const struct cuda_rows *r, void *stream) {
  enum { ON_HOST = 1, ON_DEVICE = 2 };
  bool down = r->from_kind == ON_DEVICE && r->to_kind == ON_HOST,
       up = r->from_kind == ON_HOST && r->to_kind == ON_DEVICE;
  if ((!down && !up) || r->from_x + r->from_y + r->to_x + r->to_y != 0)
    return violate(FAKE_INVALID_VALUE, "no copy of rows between host and device");
  return copy_rows(down ? COPY_DOWN : COPY_UP, down ? r->to_host : POINTER(r->to_device), r->to_pitch,
                   down ? POINTER(r->from_device) : r->from_host, r->from_pitch, r->width, r->rows, stream);
}

/* As MPI libraries ask: only the kind of memory. */
static int cuda_attribute(unsigned *value, int attribute, const void *pointer) {
  enum { MEMORY_TYPE = 2, ON_DEVICE = 2 };
  if (attribute != MEMORY_TYPE || region_of(device_memory, pointer, 1) == NULL) return FAKE_INVALID_VALUE;
  *value = ON_DEVICE;
  return 0;
}

FUNCTION(cuInit, , (unsigned flags), ANYWHERE, cuda_init(flags))
FUNCTION(cuDeviceGetCount, , (int *count), ANYWHERE, cuda_count(count))
FUNCTION(cuDeviceGet, , (int *device, int ordinal), ANYWHERE, cuda_device(device, ordinal))
FUNCTION(cuDevicePrimaryCtxRetain, , (void **context, int device), ANYWHERE, cuda_primary(context, device))
FUNCTION(cuGetErrorName, , (int code, const char **name), ANYWHERE, cuda_text(code, name, false))
FUNCTION(cuGetErrorString, , (int code, const char **text), ANYWHERE, cuda_text(code, text, true))

FUNCTION(cuStreamGetCtx, , (void *stream, void **context), ANYWHERE, cuda_context(stream, context))
FUNCTION(cuCtxPushCurrent, _v2, (void *context), ANYWHERE, cuda_push(context))
FUNCTION(cuCtxPopCurrent, _v2, (void **context), IN_CONTEXT, cuda_pop(context))

FUNCTION(cuMemHostAlloc, , (void **host, size_t bytes, unsigned flags), IN_CONTEXT, pin(host, bytes, flags, host_flags))
FUNCTION(cuMemFreeHost, , (void *host), IN_CONTEXT, unpin(host))
FUNCTION(cuStreamWriteValue32, _v2, (void *stream, address flag, uint32_t value, unsigned flags), IN_CONTEXT,
         give_value(WRITE_VALUE, stream, POINTER(flag), value, flags))
FUNCTION(cuStreamWaitValue32, _v2, (void *stream, address flag, uint32_t value, unsigned flags), IN_CONTEXT,
         give_value(AWAIT_VALUE, stream, POINTER(flag), value, flags))
FUNCTION(cuMemcpyDtoHAsync, _v2, (void *to, address from, size_t bytes, void *stream), IN_CONTEXT,
         copy_bytes(COPY_DOWN, to, POINTER(from), bytes, stream))
FUNCTION(cuMemcpyHtoDAsync, _v2, (address to, const void *from, size_t bytes, void *stream), IN_CONTEXT,
         copy_bytes(COPY_UP, POINTER(to), from, bytes, stream))
FUNCTION(cuMemcpy2DAsync, _v2, (const struct cuda_rows *rows, void *stream), IN_CONTEXT, cuda_copy_rows(rows, stream))
FUNCTION(cuMemcpyDtoDAsync, _v2, (address to, address from, size_t bytes, void *stream), IN_CONTEXT,
         copy_bytes(COPY_ACROSS, POINTER(to), POINTER(from), bytes, stream))
FUNCTION(cuMemsetD8Async, , (address device, unsigned char value, size_t bytes, void *stream), IN_CONTEXT,
         fill(POINTER(device), value, bytes, stream))
FUNCTION(cuPointerGetAttribute, , (void *value, int attribute, address pointer), ANYWHERE,
         cuda_attribute(value, attribute, POINTER(pointer)))

FUNCTION(cuEventCreate, , (void **event, unsigned flags), IN_CONTEXT, event_make(event, flags, event_flags))
FUNCTION(cuEventDestroy, _v2, (void *event), IN_CONTEXT, event_free(event))
FUNCTION(cuEventRecord, , (void *event, void *stream), IN_CONTEXT, event_record(event, stream))
FUNCTION(cuEventQuery, , (void *event), IN_CONTEXT, event_query(event))
FUNCTION(cuEventSynchronize, , (void *event), IN_CONTEXT, event_finish(event))

FUNCTION(cuStreamCreate, , (void **stream, unsigned flags), IN_CONTEXT, stream_make(stream, true, flags))
FUNCTION(cuStreamDestroy, _v2, (void *stream), IN_CONTEXT, stream_free(stream))
FUNCTION(cuStreamWaitEvent, , (void *stream, void *event, unsigned flags), IN_CONTEXT,
         stream_wait(stream, event, flags))
FUNCTION(cuStreamSynchronize, , (void *stream), IN_CONTEXT, stream_finish(stream))
FUNCTION(cuLaunchHostFunc, , (void *stream, void (*call)(void *), void *data), IN_CONTEXT,
         call_host(stream, call, data))
#endif
