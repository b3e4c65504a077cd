#include "core/watch.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/failure.h"

/* A call in words, as records and sites hold it. Of an attribute that is an object: its address. */
enum { ROW, TYPE, COUNT, FIRST_ATTRIBUTE, WORDS = FIRST_ATTRIBUTE + MAX_ATTRIBUTES };

/* What a thread waits for. Records are never freed, but used again. */
struct watched {
  atomic_uint_least64_t number; /* odd in an operation; grows by one as it begins and as it ends */
  _Atomic int64_t words[WORDS]; /* written while `number` is even */
  atomic_bool taken;            /* by a thread, */
  atomic_uint_least64_t first;  /* which found this number */
  struct watched *next;
  /* The watch's own: */
  uint64_t seen; /* the number that it saw last, */
  double since;  /* first at this time; */
  bool reported;
};

/* A line of the program, and the calls that it makes. Never freed. */
struct site {
  int64_t words[WORDS];
  struct site *next;
  char text[];
};

enum { BUCKETS = 256, MOST_SITES = 3, SECONDS_FOR_THE_LAUNCHER = 5 };

static struct watched *_Atomic records;
static struct site *_Atomic sites[BUCKETS];
static _Thread_local struct watched *own;
static pthread_key_t at_exit; /* its destructor gives a thread's record back */
static atomic_bool watching;
static _Atomic double limit; /* in seconds; the watch doubles it with each report */
static atomic_bool ends_job;
static void (*_Atomic program_is_at)(char *text, size_t size);
static const char *folder; /* of the launcher; NULL: none */

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* --- what threads that communicate do -------------------------------------------------------------------------- */

static void give_back(void *record) {
  atomic_store_explicit(&((struct watched *)record)->taken, false, memory_order_release);
}

static struct watched *take(void) {
  struct watched *record = atomic_load(&records);
  bool no = false;
  while (record != NULL && !atomic_compare_exchange_strong(&record->taken, &no, true))
    record = record->next, no = false;
  if (record == NULL) {
    if ((record = calloc(1, sizeof *record)) == NULL) return NULL;
    atomic_init(&record->taken, true);
    record->next = atomic_load(&records);
    while (!atomic_compare_exchange_weak(&records, &record->next, record)) continue;
  }
  atomic_store(&record->first, atomic_load(&record->number));
  pthread_setspecific(at_exit, record);
  return own = record;
}

static void put(struct watched *record, int word, int64_t value) {
  atomic_store_explicit(&record->words[word], value, memory_order_release); /* after the number became even */
}

/* Returns how many words there are. */
static inline int words_of(const struct call *call, int64_t words[WORDS]) {
  const struct buffer *buffer = call->buffers, *end = buffer + call->buffer_count;
  while (buffer < end && (buffer->type == NULL || role_is_of_host(buffer->role))) buffer++;
  words[ROW] = call->operation->row;
  words[TYPE] = buffer < end ? buffer->type->code : -1;
  words[COUNT] = buffer < end ? buffer->count : 0;
  int attributes = call->operation->attribute_count;
  for (int i = 0; i < attributes; i++) words[FIRST_ATTRIBUTE + i] = call->attributes[i];
  return FIRST_ATTRIBUTE + attributes;
}

struct watched *watch_begin(const struct call *call) {
  if (!atomic_load_explicit(&watching, memory_order_relaxed)) return NULL;
  struct watched *record = own;
  if (record == NULL && (record = take()) == NULL) return NULL;
  int64_t words[WORDS];
  int count = words_of(call, words);
  for (int i = 0; i < count; i++) put(record, i, words[i]);
  uint64_t number = atomic_load_explicit(&record->number, memory_order_relaxed);
  atomic_store_explicit(&record->number, number + 1 + (number & 1), memory_order_release);
  return record;
}

void watch_end(struct watched *record) {
  if (record == NULL) return;
  uint64_t number = atomic_load_explicit(&record->number, memory_order_relaxed);
  atomic_store_explicit(&record->number, number + (number & 1), memory_order_release);
}

/* --- the lines of the program ------------------------------------------------------------------------------------ */

/* Calls in chunks have other counts than their sites, which are therefore found without them. */
static unsigned bucket_of(const int64_t words[WORDS]) {
  uint64_t hash = 0;
  for (int i = 0; i < WORDS; i++)
    if (i != COUNT) hash = (hash ^ (uint64_t)words[i]) * UINT64_C(0x9e3779b97f4a7c15), hash ^= hash >> 29;
  return (unsigned)(hash % BUCKETS);
}

static bool alike(const int64_t *a, const int64_t *b, bool in_count_too) {
  for (int i = 0; i < WORDS; i++)
    if (a[i] != b[i] && (i != COUNT || in_count_too)) return false;
  return true;
}

bool watch_add_site(int row, const int64_t attributes[], int type, int64_t count, const char *text) {
  const struct operation *operation = &operation_table[row];
  int64_t words[WORDS] = {[ROW] = row, [TYPE] = type, [COUNT] = count};
  for (int i = 0; i < operation->attribute_count; i++) {
    bool object = attribute_is_object(operation->attributes[i].kind);
    words[FIRST_ATTRIBUTE + i] = object ? (int64_t)(intptr_t)registry_at(attributes[i]) : attributes[i];
  }
  struct site *_Atomic *bucket = &sites[bucket_of(words)];
  for (struct site *site = atomic_load(bucket); site != NULL; site = site->next)
    if (alike(site->words, words, true) && strcmp(site->text, text) == 0) return true;
  struct site *made = malloc(sizeof *made + strlen(text) + 1);
  if (made == NULL) return false;
  memcpy(made->words, words, sizeof words);
  memcpy(made->text, text, strlen(text) + 1);
  made->next = atomic_load(bucket); /* the GIL is held: nobody else adds */
  atomic_store(bucket, made);
  return true;
}

/* --- what the watch does ----------------------------------------------------------------------------------------- */

struct text {
  size_t length;
  char characters[2048];
};

__attribute__((format(printf, 2, 3))) static void add(struct text *text, const char *format, ...) {
  va_list arguments;
  size_t room = sizeof text->characters - text->length;
  va_start(arguments, format);
  int length = vsnprintf(text->characters + text->length, room, format, arguments);
  va_end(arguments);
  if (length > 0) text->length += (size_t)length < room ? (size_t)length : room - 1;
}

static void add_number(struct text *text, enum attribute kind, const char *name, int64_t number) {
  const struct abi *abi = runtime.abi;
  if (kind == RANK && number == abi->any_source)
    add(text, ", %s any rank", name);
  else if (kind == TAG && number == abi->any_tag)
    add(text, ", any %s", name);
  else
    add(text, ", %s %" PRId64, name, number);
}

static void add_call(struct text *text, const int64_t words[WORDS]) {
  const struct operation *operation = &operation_table[words[ROW]];
  const struct datatype *type = words[TYPE] >= 0 ? datatype_find((int)words[TYPE]) : NULL;
  add(text, "%s", operation->name);
  if (type != NULL) add(text, " of %" PRId64 " %s", words[COUNT], type->name);
  for (int i = 0; i < operation->attribute_count; i++) {
    int64_t value = words[FIRST_ATTRIBUTE + i];
    const char *name = operation->attributes[i].name;
    if (operation->attributes[i].kind == RANK || operation->attributes[i].kind == TAG)
      add_number(text, operation->attributes[i].kind, name, value);
    else if (operation->attributes[i].kind == DERIVATIVE && value != 0)
      add(text, " (%s)", derivative_name(value));
    else if (operation->attributes[i].kind == REDUCTION)
      add(text, ", %s %s", name, ((const struct reduction *)object_of(value))->name);
  }
}

static const struct communicator *comm_of(const int64_t words[WORDS]) {
  return object_of(words[FIRST_ATTRIBUTE + operation_table[words[ROW]].comm]);
}

static const char *name_of(const struct communicator *comm) {
  const char *name = atomic_load(&comm->name);
  return name != NULL ? name : "a communicator";
}

static void add_sites(struct text *text, const int64_t words[WORDS]) {
  int found = 0;
  for (int exact = 1; exact >= 0 && found == 0; exact--)
    for (struct site *site = atomic_load(&sites[bucket_of(words)]); site != NULL; site = site->next)
      if (alike(site->words, words, exact) && found++ < MOST_SITES)
        add(text, "%s%s", found == 1 ? "called at " : " or ", site->text);
  if (found > MOST_SITES) add(text, " or %d more lines", found - MOST_SITES);
}

void watch_lines(const struct call *call, char *lines, size_t size) {
  struct text text = {0, ""};
  int64_t words[WORDS] = {0};
  words_of(call, words);
  add_sites(&text, words);
  snprintf(lines, size, "%s", text.characters);
}

static void say(struct text *text) {
  add(text, "\n");
  const char *rest = text->characters, *end = rest + text->length;
  while (rest < end) {
    ssize_t written = write(STDERR_FILENO, rest, (size_t)(end - rest));
    if (written < 0 && errno != EINTR) return;
    if (written > 0) rest += written;
  }
}

/* The number of the operation that was seen last, among those of its thread. */
static uint64_t count_of(const struct watched *record) { return (record->seen - atomic_load(&record->first)) / 2 + 1; }

/* Copies the words of the operation that was seen last. False: it has just ended. */
static bool read_words(const struct watched *record, int64_t words[WORDS]) {
  for (int i = 0; i < WORDS; i++) words[i] = atomic_load_explicit(&record->words[i], memory_order_acquire);
  if (atomic_load_explicit(&record->number, memory_order_relaxed) != record->seen) return false;
  for (int i = operation_table[words[ROW]].attribute_count; i < MAX_ATTRIBUTES; i++) words[FIRST_ATTRIBUTE + i] = 0;
  return true;
}

static void add_place(struct text *text, const char *before) {
  char place[512] = "";
  void (*where)(char *, size_t) = atomic_load(&program_is_at);
  if (where != NULL) where(place, sizeof place);
  if (*place != '\0') add(text, "%sPython is at %s", before, place);
}

/* Writes a file of the folder, RANK.kind, at once and whole. */
static void write_file(const char *kind, const struct text *text) {
  char path[512], draft[512];
  snprintf(path, sizeof path, "%s/%d.%s", folder, runtime.rank, kind);
  snprintf(draft, sizeof draft, "%s/%d.draft", folder, runtime.rank);
  int file = open(draft, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) return; /* a folder of another machine */
  bool whole = write(file, text->characters, text->length) == (ssize_t)text->length;
  close(file);
  if (whole) rename(draft, path);
}

/* Answers the launcher. Four fields in lines: seconds (-1: in no operation), the call, the communicator, the places. */
static void answer(void) {
  static char answered[32];
  char path[512], asked[sizeof answered] = "";
  snprintf(path, sizeof path, "%s/ask", folder);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ssize_t length = read(file, asked, sizeof asked - 1);
  close(file);
  if (length <= 0 || strcmp(asked, answered) == 0) return;
  memcpy(answered, asked, sizeof answered);
  struct text text = {0, ""};
  int64_t words[WORDS];
  const struct watched *longest = NULL;
  for (struct watched *record = atomic_load(&records); record != NULL; record = record->next)
    if (record->seen % 2 == 1 && (longest == NULL || record->since < longest->since)) longest = record;
  if (longest != NULL && read_words(longest, words)) {
    add(&text, "%.3g\n", now() - longest->since);
    add_call(&text, words);
    add(&text, "\n%s\n", name_of(comm_of(words)));
    size_t before = text.length;
    add_sites(&text, words);
    add_place(&text, text.length > before ? "; " : "");
  } else {
    add(&text, "-1\n\n\n");
    add_place(&text, "");
  }
  write_file("state", &text);
}

static void report(const struct watched *record, double seconds) {
  int64_t words[WORDS];
  if (!read_words(record, words)) return;
  struct text text = {0, ""};
  const struct communicator *comm = comm_of(words);
  add(&text, "jaxmpi: rank %d has been waiting for %.3g s in ", runtime.rank, seconds);
  add_call(&text, words);
  add(&text, ", as rank %d of %d on %s (operation %" PRIu64 " of its thread); ", comm->rank, comm->size, name_of(comm),
      count_of(record));
  add_sites(&text, words);
  add_place(&text, text.characters[text.length - 2] == ';' ? "" : "; ");
  if (ends_job) add(&text, ". The job ends, as JAXMPI_TIMEOUT_ACTION=abort says");
  say(&text);
  if (folder != NULL) write_file("report", &text);
}

/* Reports an operation once, and then that it is done after all. */
static void look_at(struct watched *record) {
  uint64_t number = atomic_load_explicit(&record->number, memory_order_acquire);
  double time = now(), seconds = time - record->since;
  if (number != record->seen) {
    if (record->reported) {
      struct text text = {0, ""};
      add(&text, "jaxmpi: rank %d is done with operation %" PRIu64 " after %.3g s", runtime.rank, count_of(record),
          seconds);
      say(&text);
    }
    record->seen = number;
    record->since = time;
    record->reported = false;
  } else if (number % 2 == 1 && !record->reported && seconds >= limit) {
    record->reported = true;
    report(record, seconds);
    atomic_store(&limit, 2 * atomic_load(&limit)); /* a program that often waits as long is not told for ever */
    if (!ends_job) return;
    for (int i = 0; folder != NULL && i < SECONDS_FOR_THE_LAUNCHER * 10; i++) {
      nanosleep(&(struct timespec){0, 100000000}, NULL);
      answer();
    }
    job_end();
  }
}

static void *watch(void *unused) {
  double tick = fmin(1, atomic_load(&limit) / 8);
  struct timespec pause = {(time_t)tick, (long)(1e9 * (tick - floor(tick)))};
  while (nanosleep(&pause, NULL) == 0 || errno == EINTR) {
    for (struct watched *record = atomic_load(&records); record != NULL; record = record->next)
      if (atomic_load(&watching)) look_at(record);
    if (folder != NULL && atomic_load(&watching)) answer();
  }
  return unused;
}

void watch_configure(double seconds, bool ends, void (*where)(char *text, size_t size)) {
  static bool running;
  pthread_t thread;
  sigset_t all, before;
  if (seconds <= 0) return;
  atomic_store(&limit, seconds);
  atomic_store(&ends_job, ends);
  atomic_store(&program_is_at, where);
  if (folder == NULL && getenv("JAXMPI_JOB_FOLDER") != NULL) folder = strdup(getenv("JAXMPI_JOB_FOLDER"));
  atomic_store(&watching, true);
  if (running) return;
  running = true;
  if (pthread_key_create(&at_exit, give_back) != 0) return;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's threads */
  if (pthread_create(&thread, NULL, watch, NULL) == 0) pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void watch_stop(void) { atomic_store(&watching, false); }
