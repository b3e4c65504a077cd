/* The timeline: a thread records operations while the writer turns them into text and frees what it is done with. */
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "core/plan.h"
#include "explore.h"
#include "observe/summary.h"

#define calloc explore_calloc
#define free   explore_free
#define memcpy explore_memcpy
#include "base/threads.c"
#include "observe/timeline.c"

static struct communicator comm = {.number = 5, .size = 2};
static struct call call;
static char lines[1 << 16];

static int text_count(const char *phase) {
  int count = 0;
  for (const char *at = writer.lines.characters; (at = strstr(at, phase)) != NULL; at++) count++;
  return count;
}

/* The thread's block has room for one event more: the second one needs a new block. */
static void begin(void) {
  memset(&call, 0, sizeof call);
  call.operation = &operation_table[ROW_barrier];
  call.comm = &comm;
  call.attributes[attribute_of(call.operation, KIND_OBJECT)] = (int64_t)(intptr_t)&comm;
  atomic_store(&records.all, NULL);
  records.bytes = sizeof(struct track);
  atomic_store(&timeline_on, true);
  atomic_store(&full, false);
  atomic_store(&blocks, 0);
  writer.room = 1 << 20;
  writer.lines = text_in(lines, sizeof lines);
  struct track *track = thread_record_take(&records);
  struct block *block = make_block();
  atomic_store(&block->count, EVENTS - 1);
  atomic_store(&track->first, block);
  track->filled = track->written = block;
  track->done = EVENTS - 1;
  own = NULL;
}

static struct track *only_track(void) { return (struct track *)(void *)atomic_load(&records.all); }

static void record_three(void) {
  own = only_track();
  for (int i = 0; i < 3; i++)
    if (timeline_begin(&call)) timeline_end(&call, false);
}

/* At a time at which all that has begun has taken long. */
static void write_twice(void) {
  for (int i = 0; i < 2; i++) write_track(only_track(), INT64_MAX);
}

/* Each event is there once: with its beginning and its end, or both in one. */
static void check_text(void) {
  write_track(only_track(), 0);
  REQUIRE(text_count("\"ph\":\"X\"") + text_count("\"ph\":\"E\"") == 3);
  REQUIRE(text_count("\"ph\":\"B\"") == text_count("\"ph\":\"E\""));
  REQUIRE(atomic_load(&blocks) == 1);
}

/* The first event of all, at the switch. */
static void begin_off(void) {
  begin();
  atomic_store(&records.all, NULL);
  records.bytes = 0;
  atomic_store(&timeline_on, false);
}

static void switch_on(void) {
  records.bytes = sizeof(struct track); /* timeline_open: thread_records_begin */
  atomic_store(&timeline_on, true);
}

static void record_if_on(void) {
  own = NULL;
  if (timeline_is_on() && timeline_begin(&call)) timeline_end(&call, false);
}

static void write_all_tracks(void) {
  for (struct thread_record *record = atomic_load(&records.all); record != NULL; record = record->next)
    write_track((struct track *)(void *)record, INT64_MAX);
}

static void weaken(size_t offset, size_t bytes) {
  begin();
  explore_weaken((char *)only_track()->filled + offset, bytes, EXPLORE_STORES);
}
static void begin_weaker_count(void) { weaken(offsetof(struct block, count), sizeof(atomic_int)); }
static void begin_weaker_next(void) { weaken(offsetof(struct block, next), sizeof(struct block *)); }
static void begin_weaker_begin(void) {
  weaken(offsetof(struct block, events) + (EVENTS - 1) * sizeof(struct event) + offsetof(struct event, begin), 8);
}

int main(void) {
  struct exploration writing = {
      "timeline: write while a thread records", begin, check_text, {record_three, write_twice}, 3};
  const struct exploration switched = {
      "timeline: switch it on", begin_off, NULL, {switch_on, record_if_on, write_all_tracks}, 3};
  explore_good(&writing);
  writing.begin = begin_weaker_count;
  explore_bad(&writing, "`count` stored relaxed");
  writing.begin = begin_weaker_next;
  explore_bad(&writing, "`next` stored relaxed");
  writing.begin = begin_weaker_begin;
  explore_bad(&writing, "`begin` stored relaxed");
  explore_good(&switched);
  EXPLORE_WEAKER(&switched, timeline_on, LOADS);
  return explore_result();
}
