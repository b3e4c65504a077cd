/* Records of threads: taken, given back as a thread ends, and all gone through by another thread. */
#include <stdlib.h>

#include "explore.h"

#define calloc explore_calloc
#include "base/threads.c"

/* As those of the watchdog and the timeline. */
struct record {
  struct thread_record thread;
  int value; /* of the thread that has it */
};
static struct thread_records records;
static atomic_bool on; /* as `watching` and `timeline_on`: records may be taken */

static void begin(void) {
  atomic_store(&records.all, NULL);
  atomic_store(&records.count, 0);
  atomic_store(&on, false);
}

static void take_and_give(void) {
  struct record *record = thread_record_take(&records);
  record->value++;
  REQUIRE(record->value <= 2);
  give_record_back(record);
}

static void go_through_all(void) {
  for (int times = 0; times < 2; times++)
    for (struct thread_record *record = atomic_load(&records.all); record != NULL; record = record->next)
      REQUIRE(record->number > 0);
}

static void check_all(void) {
  int sum = 0;
  for (struct thread_record *record = atomic_load(&records.all); record != NULL; record = record->next)
    sum += ((struct record *)(void *)record)->value;
  REQUIRE(sum == 2);
}

static void begin_weaker(void) {
  begin();
  thread_record_take(&records);
  give_record_back(atomic_load(&records.all));
  explore_weaken(&atomic_load(&records.all)->taken, sizeof(atomic_bool), EXPLORE_STORES);
}

static void begin_off(void) {
  begin();
  records.bytes = 0;
}

static void switch_on(void) {
  records.bytes = sizeof(struct record); /* thread_records_begin */
  atomic_store(&on, true);
}

static void take_if_on(void) {
  if (atomic_load_explicit(&on, memory_order_acquire)) thread_record_take(&records);
}

int main(void) {
  struct exploration taking = {"threads: take, give back", begin, check_all, {take_and_give, take_and_give, NULL}, 9};
  const struct exploration walk = {
      "threads: go through all", begin, NULL, {take_and_give, take_and_give, go_through_all}, 2};
  const struct exploration switched = {
      "threads: take once it is on", begin_off, NULL, {switch_on, take_if_on, NULL}, 9};
  if (!thread_records_begin(&records, sizeof(struct record))) return EXIT_FAILURE;
  explore_good(&taking);
  taking.begin = begin_weaker;
  explore_bad(&taking, "`taken` stored relaxed");
  explore_good(&walk);
  EXPLORE_WEAKER(&walk, records.all, STORES);
  EXPLORE_WEAKER(&walk, records.all, LOADS);
  explore_good(&switched);
  EXPLORE_WEAKER(&switched, on, LOADS);
  return explore_result();
}
