#include "observe/timeline.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/threads.h"
#include "core/plan.h"
#include "observe/summary.h"

/* An operation. The writer may read it when `block.count` is beyond it; all before `end` when `begin` is not 0. */
struct event {
  int64_t summary[SUMMARY_WORDS];
  int64_t sent, received; /* bytes that this rank passes to the operation, and takes from it */
  _Atomic int64_t begin;  /* nanoseconds of the monotonic clock */
  int64_t end;
  int64_t request; /* the request that was started or waited for; 0 without one */
  int from, tag;   /* of the received message */
  bool failed;
};

enum { EVENTS = 512, MOST_BLOCKS = 1024, LONG_NANOSECONDS = 1000000000, PAUSE_MILLISECONDS = 100, FLUSHED = 1 << 16 };

struct block {
  atomic_int count; /* events that are complete */
  struct block *_Atomic next;
  struct event events[EVENTS];
};

/* The events of a thread. */
struct track {
  struct thread_record thread;
  struct block *_Atomic first; /* set by the thread, read by the writer */
  /* Used by the thread alone: */
  struct block *filled;      /* the last block */
  const struct call *inside; /* the recorded call. A call inside it, of a reduction in Python, is not recorded */
  struct event *event;       /* of that call; NULL: left out */
  /* Used by the writer alone: */
  struct block *written; /* the block that is being written */
  int done;              /* events of this block that have been written */
  bool begun;            /* the beginning of the next event has been written */
};

atomic_bool timeline_on;
static struct thread_records records;
static _Thread_local struct track *own;
static atomic_int blocks;
static atomic_uint_least64_t lost;
static atomic_bool full; /* set when one event is left out: then all further ones are, so that there are no gaps */

static int64_t nanoseconds_now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* --- in threads that communicate -------------------------------------------------------------------------------- */

static struct block *make_block(void) {
  struct block *block = NULL;
  if (atomic_fetch_add(&blocks, 1) < MOST_BLOCKS) block = calloc(1, sizeof *block);
  if (block == NULL) atomic_fetch_sub(&blocks, 1);
  return block;
}

/* Return the place for the next event of this thread; NULL: there is none. */
static struct event *next_event(struct track *track) {
  struct block *block = track->filled;
  int count = block != NULL ? atomic_load_explicit(&block->count, memory_order_relaxed) : EVENTS;
  if (count < EVENTS) return &block->events[count];
  struct block *fresh = make_block();
  if (fresh == NULL) return NULL;
  atomic_store_explicit(block != NULL ? &block->next : &track->first, fresh, memory_order_release);
  track->filled = fresh; /* from now on the writer may free the block before */
  return &fresh->events[0];
}

/* Add the bytes of a call. With a plan: of the messages, which are parts of the buffers. Of a request: at its start.
 */
static void add_bytes(struct event *event, const struct call *call) {
  const struct plan *plan = plan_of(call);
  int64_t count = 0;
  const struct datatype *type = array_not_passed(call->operation, call->attributes, &count);
  if (call->operation->row == ROW_wait) return;
  if (type != NULL) event->received = count * (int64_t)type->bytes;
  if (plan != NULL) {
    for (int i = 0; i < plan->send_count; i++) event->sent += plan->sends[i].bytes;
    for (int i = 0; i < plan->receive_count; i++) event->received += plan->receives[i].bytes;
    return;
  }
  for (int i = 0; i < call->buffer_count; i++) {
    const struct buffer *buffer = &call->buffers[i];
    if (buffer->type == NULL || role_is_of_host(buffer->role)) continue;
    *(role_is_written(buffer->role) ? &event->received : &event->sent) += (int64_t)buffer_bytes(buffer);
  }
}

static void begin_event(struct track *track, const struct call *call, const int64_t summary[], int count) {
  struct event *event = atomic_load_explicit(&full, memory_order_relaxed) ? NULL : next_event(track);
  track->event = event;
  if (event == NULL) {
    atomic_store(&full, true);
    atomic_fetch_add(&lost, 1);
    return;
  }
  memcpy(event->summary, summary, (size_t)count * sizeof *summary);
  add_bytes(event, call);
  atomic_store_explicit(&event->begin, nanoseconds_now(), memory_order_release);
}

static void end_event(struct track *track, const struct call *call, bool failed) {
  struct event *event = track->event;
  if (event == NULL) return;
  struct block *block = track->filled;
  event->end = nanoseconds_now();
  event->failed = failed;
  event->request = call->timeline.request;
  event->from = call->timeline.from;
  event->tag = call->timeline.tag;
  atomic_store_explicit(&block->count, atomic_load_explicit(&block->count, memory_order_relaxed) + 1,
                        memory_order_release);
}

bool timeline_begin(const struct call *call) {
  if (call->operation->row == ROW_check) return false; /* communicates nothing */
  struct track *track = own;
  if (track == NULL && (track = own = thread_record_take(&records)) == NULL) return false;
  if (track->inside != NULL) return false;
  int64_t summary[SUMMARY_WORDS];
  int count = summarize(call, summary);
  track->inside = call;
  begin_event(track, call, summary, count);
  return true;
}

void timeline_next(struct call *call, bool failed) {
  if (own == NULL || own->inside != call || own->event == NULL) return;
  int64_t summary[SUMMARY_WORDS];
  memcpy(summary, own->event->summary, sizeof summary); /* the call may already have the words of a request */
  end_event(own, call, failed);
  call->timeline.from = -1, call->timeline.request = 0;
  begin_event(own, call, summary, SUMMARY_WORDS);
}

void timeline_end(const struct call *call, bool failed) {
  end_event(own, call, failed);
  own->inside = NULL;
}

/* --- in the writer ---------------------------------------------------------------------------------------------- */

static struct {
  int file;
  int64_t room; /* bytes that the file may still grow by */
  pid_t process;
  pthread_t thread;
  pthread_mutex_t lock; /* of these two: */
  pthread_cond_t wake;
  bool closing;
  atomic_bool broken;
  struct text lines; /* that are not in the file yet, of any length: they contain names that the program gives */
  struct text sites; /* of the next line */
} writer = {.lines = {.grows = true},
            .sites = {.grows = true},
            .file = -1,
            .lock = PTHREAD_MUTEX_INITIALIZER,
            .wake = PTHREAD_COND_INITIALIZER};

/* Write whole lines at once, because notes may come between. Return an error number, or 0. */
static int put_in_file(const char *text, size_t length) {
  while (length > 0) {
    if (writer.broken) return EIO;
    ssize_t written = write(writer.file, text, length);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      writer.broken = true; /* the file may end within a line: nothing more is written */
      return errno;
    }
    text += written;
    length -= (size_t)written;
  }
  return 0;
}

static void flush_lines(void) {
  int error = put_in_file(writer.lines.characters, writer.lines.length);
  if (error != 0 && atomic_exchange(&timeline_on, false))
    fprintf(stderr, "jaxmpi: rank %d cannot write its timeline any more: %s\n", runtime.rank, strerror(error));
  text_shorten(&writer.lines, 0);
}

/* Add a JSON string. It may have any bytes of a file's name. */
static void add_string(struct text *line, const char *name, const char *string) {
  text_add(line, ",\"%s\":\"", name);
  while (*string != '\0') {
    size_t plain = 0;
    while ((unsigned char)string[plain] >= 0x20 && string[plain] != '"' && string[plain] != '\\') plain++;
    text_add_characters(line, string, plain);
    string += plain;
    if (*string == '\0') break;
    text_add(line, (unsigned char)*string < 0x20 ? "\\u%04x" : "\\%c", *string);
    string++;
  }
  text_add(line, "\"");
}

static const char *event_name(const struct event *event) {
  return operation_name(&operation_table[event->summary[SUMMARY_ROW]], &event->summary[SUMMARY_ATTRIBUTES]);
}

static void add_attribute(struct text *line, const struct event *event, int index) {
  const struct operation *operation = &operation_table[event->summary[SUMMARY_ROW]];
  int64_t value = event->summary[SUMMARY_ATTRIBUTES + index];
  const char *name = operation->attributes[index].name;
  enum attribute kind = operation->attributes[index].kind;
  if (kind == KIND_RANK || kind == KIND_TAG) text_add(line, ",\"%s\":%" PRId64, name, value);
  if (kind == KIND_REDUCTION) add_string(line, name, ((const struct reduction *)object_of(value))->name);
  if (kind == KIND_DERIVATIVE && value != 0) add_string(line, name, derivative_name(value));
}

static void add_arguments(struct text *line, const struct event *event, bool complete) {
  const struct operation *operation = &operation_table[event->summary[SUMMARY_ROW]];
  bool of_many = event->summary[SUMMARY_ROW] == ROW_wait;
  const struct datatype *type = of_many ? NULL : datatype_find((int)event->summary[SUMMARY_TYPE]);
  int64_t count = event->summary[SUMMARY_COUNT];
  if (type == NULL) type = array_not_passed(operation, &event->summary[SUMMARY_ATTRIBUTES], &count);
  text_add(line, ",\"args\":{\"comm\":%" PRId64, summary_comm(event->summary)->number);
  if (strcmp(operation->id, event_name(event)) != 0) add_string(line, "operation", operation->id);
  for (int i = 0; i < operation->attribute_count; i++) add_attribute(line, event, i);
  if (complete && event->request > 0) text_add(line, ",\"request\":%" PRId64, event->request);
  if (complete && event->from >= 0) text_add(line, ",\"from\":%d,\"from_tag\":%d", event->from, event->tag);
  if (type != NULL) text_add(line, ",\"count\":%" PRId64 ",\"dtype\":\"%s\"", count, type->name);
  if (event->sent > 0) text_add(line, ",\"sent\":%" PRId64, event->sent);
  if (event->received > 0) text_add(line, ",\"received\":%" PRId64, event->received);
  if (complete && event->failed) text_add(line, ",\"failed\":true");
  text_shorten(&writer.sites, 0);
  summary_add_call_sites(&writer.sites, "", event->summary);
  if (writer.sites.length > 0) add_string(line, "line", writer.sites.characters);
  text_add(line, "}");
}

/* Write the line of an event. Phases: B, the beginning of a long event, and later E, the end; otherwise X, both. */
static void put_event(const struct event *event, int track, char phase) {
  struct text *line = &writer.lines;
  size_t before = line->length;
  int64_t begin = atomic_load_explicit(&event->begin, memory_order_acquire), at = phase == 'E' ? event->end : begin;
  text_add(line, "{\"name\":\"%s\",\"ph\":\"%c\",\"pid\":%d,\"tid\":%d,\"ts\":%" PRId64 ".%03d", event_name(event),
           phase, runtime.rank, track, at / 1000, (int)(at % 1000));
  int64_t duration = phase == 'X' ? event->end - begin : 0;
  if (phase == 'X') text_add(line, ",\"dur\":%" PRId64 ".%03d", duration / 1000, (int)(duration % 1000));
  add_arguments(line, event, phase != 'B');
  text_add(line, "},\n");
  if (line->cut || (writer.room -= (int64_t)(line->length - before)) < 0) {
    text_shorten(line, before);
    atomic_store(&full, true);
    atomic_fetch_add(&lost, 1);
  }
  if (line->length > FLUSHED) flush_lines();
}

/* Write the complete events, and the beginning of a long one. If a process is killed in it, that is the last line. */
static void write_track(struct track *track, int64_t time) {
  int number = track->thread.number; /* the first thread has the lowest number */
  if (track->written == NULL) track->written = atomic_load_explicit(&track->first, memory_order_acquire);
  while (track->written != NULL) {
    struct block *block = track->written;
    int count = atomic_load_explicit(&block->count, memory_order_acquire);
    for (; track->done < count; track->done++, track->begun = false)
      put_event(&block->events[track->done], number, track->begun ? 'E' : 'X');
    struct block *next = atomic_load_explicit(&block->next, memory_order_acquire);
    if (count < EVENTS || next == NULL) break;
    free(block);
    atomic_fetch_sub(&blocks, 1);
    track->written = next;
    track->done = 0;
  }
  if (track->written == NULL || track->done == EVENTS || track->begun) return;
  const struct event *event = &track->written->events[track->done];
  int64_t begin = atomic_load_explicit(&event->begin, memory_order_acquire);
  if (begin == 0 || time - begin < LONG_NANOSECONDS) return;
  put_event(event, number, 'B');
  track->begun = true;
}

static void write_all(void) {
  int64_t time = nanoseconds_now();
  for (struct thread_record *record = atomic_load(&records.all); record != NULL; record = record->next)
    write_track((struct track *)(void *)record, time);
  flush_lines();
}

static void *write_until_closed(void *unused) {
  pthread_mutex_lock(&writer.lock);
  while (!writer.closing) {
    thread_wait(&writer.wake, &writer.lock, PAUSE_MILLISECONDS * 1000000);
    write_all();
  }
  pthread_mutex_unlock(&writer.lock);
  return unused;
}

int timeline_open(int file, int64_t limit) {
  static bool begun;
  int error = begun || thread_records_begin(&records, sizeof(struct track)) ? 0 : EAGAIN;
  begun |= error == 0;
  writer.file = file;
  writer.room = limit;
  writer.process = getpid();
  writer.closing = false;
  thread_condition(&writer.wake);
  atomic_store(&lost, 0);
  atomic_store(&full, false);
  writer.broken = false;
  if (error == 0) error = put_in_file("[\n", 2);
  if (error == 0) {
    atomic_store(&timeline_on, true);
    error = thread_start(&writer.thread, write_until_closed);
  }
  if (error == 0) return 0;
  atomic_store(&timeline_on, false);
  close(writer.file);
  writer.file = -1;
  return error;
}

void timeline_note(const char *line) {
  if (writer.file >= 0 && getpid() == writer.process) put_in_file(line, strlen(line));
}

void timeline_close(void) {
  if (writer.file < 0 || getpid() != writer.process) return; /* a child of fork has no writer */
  atomic_store(&timeline_on, false);
  pthread_mutex_lock(&writer.lock);
  writer.closing = true;
  pthread_cond_signal(&writer.wake);
  pthread_mutex_unlock(&writer.lock);
  pthread_join(writer.thread, NULL);
  write_all();
  char end[160];
  snprintf(end, sizeof end,
           "{\"name\":\"jaxmpi_end\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"lost\":%" PRIu64 ",\"limit\":%s}}\n]\n",
           runtime.rank, (uint64_t)atomic_load(&lost), writer.room < 0 ? "true" : "false");
  put_in_file(end, strlen(end));
  close(writer.file);
  writer.file = -1;
}
