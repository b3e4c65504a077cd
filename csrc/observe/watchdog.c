#include "observe/watchdog.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <unistd.h>

#include "base/threads.h"
#include "core/job.h"
#include "core/runtime.h"

/* The operation that a thread waits in. */
struct watched {
  struct thread_record thread;
  atomic_uint_least64_t number;           /* odd in an operation; grows by one at the beginning and at the end */
  _Atomic int64_t summary[SUMMARY_WORDS]; /* written while `number` is even */
  atomic_uint_least64_t first;            /* the number when the thread took the record */
  /* Used by the watchdog alone: */
  uint64_t seen; /* the number at the last look, */
  double since;  /* seen first at this time */
  bool reported;
};

enum { SECONDS_FOR_OTHERS = 5, MOST_STEPS_TO_STOP = 100, MOST_SPEAKERS = 16 };

static struct thread_records records;
static _Thread_local struct watched *own;
static atomic_bool watching;
static atomic_bool polling;          /* the watchdog reads records now */
static _Atomic double limit;         /* in seconds; the watchdog doubles it with each report */
static _Atomic double pause_seconds; /* between two looks */
static atomic_int waiting;           /* operations that have been reported and, at the last look, had not ended */
static _Atomic enum action action;
static void (*_Atomic program_is_at)(char *text, size_t size);

static struct watched *first_record(void) { return (struct watched *)(void *)atomic_load(&records.all); }
static struct watched *next_record(struct watched *record) { return (struct watched *)(void *)record->thread.next; }

/* --- in threads that communicate -------------------------------------------------------------------------------- */

static struct watched *take_record(void) {
  struct watched *record = thread_record_take(&records);
  if (record == NULL) return NULL;
  atomic_store(&record->first, atomic_load(&record->number));
  return own = record;
}

static void put_word(struct watched *record, int word, int64_t value) {
  atomic_store_explicit(&record->summary[word], value, memory_order_release); /* after the number became even */
}

struct watched *watchdog_begin_summary(const int64_t summary[], int count) {
  if (!atomic_load_explicit(&watching, memory_order_acquire)) return NULL; /* `records` began before it was set */
  struct watched *record = own;
  if (record == NULL && (record = take_record()) == NULL) return NULL;
  for (int i = 0; i < count; i++) put_word(record, i, summary[i]);
  uint64_t number = atomic_load_explicit(&record->number, memory_order_relaxed);
  atomic_store_explicit(&record->number, number + 1 + (number & 1), memory_order_release);
  return record;
}

struct watched *watchdog_begin(const struct call *call) {
  int64_t summary[SUMMARY_WORDS];
  if (!atomic_load_explicit(&watching, memory_order_relaxed)) return NULL;
  return watchdog_begin_summary(summary, summarize(call, summary));
}

void watchdog_end(struct watched *record) {
  if (record == NULL) return;
  uint64_t number = atomic_load_explicit(&record->number, memory_order_relaxed);
  atomic_store_explicit(&record->number, number + (number & 1), memory_order_release);
}

/* --- in the watchdog's thread ----------------------------------------------------------------------------------- */

/* Among many ranks only the launcher gets a report. It makes one table; stderr would have one line for each rank. */
static bool is_for_launcher_alone(void) {
  return job_has_folder() && runtime.world != NULL && runtime.world->size > MOST_SPEAKERS;
}

static void say_report(struct text *text) {
  if (is_for_launcher_alone()) return;
  text_add(text, "\n");
  const char *rest = text->characters, *end = rest + text->length;
  while (rest < end) {
    ssize_t written = write(STDERR_FILENO, rest, (size_t)(end - rest));
    if (written < 0 && errno != EINTR) return;
    if (written > 0) rest += written;
  }
}

/* Return the number of the operation that was seen last, in its thread. */
static uint64_t count_of(const struct watched *record) { return (record->seen - atomic_load(&record->first)) / 2 + 1; }

/* Copy the words of the operation that was seen last. False: it has just ended. */
static bool read_words(const struct watched *record, int64_t summary[SUMMARY_WORDS]) {
  for (int i = 0; i < SUMMARY_WORDS; i++) summary[i] = atomic_load_explicit(&record->summary[i], memory_order_acquire);
  if (atomic_load_explicit(&record->number, memory_order_relaxed) != record->seen) return false;
  for (int i = operation_table[summary[SUMMARY_ROW]].attribute_count; i < MAX_ATTRIBUTES; i++)
    summary[SUMMARY_ATTRIBUTES + i] = 0;
  return true;
}

static void add_place(struct text *text, const char *before) {
  char place[512] = "";
  void (*where)(char *, size_t) = atomic_load(&program_is_at);
  if (where != NULL) where(place, sizeof place);
  if (*place != '\0') text_add(text, "%sPython is at %s", before, place);
}

/* Answer the launcher. Four fields in lines: seconds (-1: in no operation), the call, the communicator, the places. */
static void answer_launcher(void) {
  static char answered[32];
  char question[sizeof answered];
  job_question(question, sizeof question);
  if (*question == '\0' || strcmp(question, answered) == 0) return;
  memcpy(answered, question, sizeof answered);
  char characters[TEXT_BYTES];
  struct text text = text_in(characters, sizeof characters);
  int64_t summary[SUMMARY_WORDS];
  const struct watched *longest = NULL;
  for (struct watched *record = first_record(); record != NULL; record = next_record(record))
    if (record->seen % 2 == 1 && (longest == NULL || record->since < longest->since)) longest = record;
  if (longest != NULL && read_words(longest, summary)) {
    text_add(&text, "%.3g\n", seconds_now() - longest->since);
    summary_describe(&text, summary);
    text_add(&text, "\n%s\n", comm_name(summary_comm(summary)));
    size_t before = text.length;
    summary_add_call_sites(&text, "called at ", summary);
    add_place(&text, text.length > before ? "; " : "");
  } else {
    text_add(&text, "-1\n\n\n");
    add_place(&text, "");
  }
  job_tell("state", text.characters, text.length);
}

/* Report a wait on stderr and to the launcher, by a text that is empty before. */
static void report_wait(const struct watched *record, double seconds, struct text *text) {
  int64_t summary[SUMMARY_WORDS];
  if (!read_words(record, summary)) return;
  const struct communicator *comm = summary_comm(summary);
  text_add(text, "jaxmpi: rank %d has been waiting for %.3g s in ", runtime.rank, seconds);
  summary_describe(text, summary);
  text_add(text, ", as rank %d of %d on %s (operation %" PRIu64 " of its thread)", comm->rank, comm->size,
           comm_name(comm), count_of(record));
  summary_add_call_sites(text, "; called at ", summary);
  add_place(text, "; ");
  if (action == ACTION_ABORT) text_add(text, ". The job ends, as JAXMPI_TIMEOUT_ACTION=abort says");
  say_report(text);
  job_tell("report", text->characters, text->length);
}

/* Report an operation once, and report it again when it has ended after all. */
static void check_record(struct watched *record) {
  uint64_t number = atomic_load_explicit(&record->number, memory_order_acquire);
  double time = seconds_now(), seconds = time - record->since;
  char characters[TEXT_BYTES];
  struct text text = text_in(characters, sizeof characters);
  if (number != record->seen) {
    if (record->reported) {
      text_add(&text, "jaxmpi: rank %d is done with operation %" PRIu64 " after %.3g s", runtime.rank, count_of(record),
               seconds);
      say_report(&text);
      atomic_fetch_sub(&waiting, 1);
    }
    record->seen = number;
    record->since = time;
    record->reported = false;
  } else if (number % 2 == 1 && !record->reported && seconds >= limit) {
    record->reported = true;
    atomic_fetch_add(&waiting, 1);
    report_wait(record, seconds, &text);
    atomic_store(&limit, 2 * atomic_load(&limit)); /* fewer reports for a program that often waits this long */
    if (action != ACTION_ABORT) return;
    for (int i = 0; i < SECONDS_FOR_OTHERS * 10; i++) { /* others report, and the launcher makes a table */
      nanosleep(&(struct timespec){0, 100000000}, NULL);
      answer_launcher();
    }
    job_end(text.length > 0 ? text.characters : "an operation waits");
  }
}

/* `polling` is set before `watching` is read. So a thread that stops the watchdog waits for the end of this function,
 * or this function checks nothing. */
static void check_all(void) {
  atomic_store(&polling, true);
  for (struct watched *record = first_record(); record != NULL; record = next_record(record))
    if (atomic_load(&watching)) check_record(record);
  if (atomic_load(&watching)) answer_launcher();
  atomic_store(&polling, false);
}

static void *run_watchdog(void *unused) {
  double tick = atomic_load(&pause_seconds);
  struct timespec pause = {(time_t)tick, (long)(1e9 * (tick - floor(tick)))};
  while (nanosleep(&pause, NULL) == 0 || errno == EINTR) check_all();
  return unused;
}

void watchdog_configure(double seconds, enum action wanted, void (*where)(char *text, size_t size)) {
  static bool running;
  pthread_t thread;
  job_begin();
  if (seconds <= 0) return;
  atomic_store(&limit, seconds);
  atomic_store(&action, wanted);
  atomic_store(&program_is_at, where);
  if (running) {
    atomic_store(&watching, true);
    return;
  }
  atomic_store(&pause_seconds, fmin(1, seconds / 8));
  if (!thread_records_begin(&records, sizeof(struct watched))) return; /* no thread takes a record before this */
  running = true;
  atomic_store(&watching, true);
  if (thread_start(&thread, run_watchdog) == 0) pthread_detach(thread);
}

void watchdog_stop(void) {
  if (atomic_load(&waiting) > 0) { /* the watchdog checks once more: a reported operation may have ended */
    double seconds = atomic_load(&pause_seconds) + 0.02;
    nanosleep(&(struct timespec){(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))}, NULL);
  }
  atomic_store(&watching, false);
  for (int i = 0; atomic_load(&polling) && i < MOST_STEPS_TO_STOP; i++) /* it may call Python, which must not end yet */
    nanosleep(&(struct timespec){0, 10000000}, NULL);
}
