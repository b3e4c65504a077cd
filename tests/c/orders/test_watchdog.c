/* The watchdog: reads what threads wait for while they go on, and stops before Python does. */
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "core/job.h"
#include "explore.h"

/* Python's, of which the watchdog may ask until it has stopped. */
static int python;
static void ask_python(char *text) { *text = (char)python; }
#define job_question(text, size) ask_python(text)

static int sleep_here(const struct timespec *time, struct timespec *rest) {
  (void)time, (void)rest;
  explore_pause();
  return 0;
}
#define nanosleep sleep_here

#define calloc explore_calloc
#include "base/threads.c"
#include "observe/watchdog.c"

/* --- the words of an operation are those that belong to its number --- */

static struct watched record;

static void begin(void) {
  atomic_store(&watching, true);
  atomic_store(&record.number, 0);
  for (int i = 0; i < SUMMARY_WORDS; i++) atomic_store(&record.summary[i], 0);
}

/* Two operations, whose words are 1 and 2. */
static void wait_twice(void) {
  own = &record;
  for (int64_t value = 1; value <= 2; value++) {
    int64_t words[] = {[SUMMARY_ROW] = value, [SUMMARY_TYPE] = value};
    watchdog_end(watchdog_begin_summary(words, 2));
  }
}

static void read_once(void) {
  int64_t words[SUMMARY_WORDS];
  record.seen = atomic_load_explicit(&record.number, memory_order_acquire); /* check_record */
  if (record.seen % 2 == 0 || !read_words(&record, words)) return;
  REQUIRE(words[SUMMARY_ROW] == (int64_t)(record.seen + 1) / 2);
  REQUIRE(words[SUMMARY_TYPE] == (int64_t)(record.seen + 1) / 2);
}

/* --- nothing asks Python once it has stopped --- */

static void begin_to_stop(void) {
  atomic_store(&records.all, NULL);
  atomic_store(&watching, true);
  atomic_store(&polling, false);
  python = 1;
}

static void look(void) { check_all(); }

static void stop(void) {
  watchdog_stop();
  python = 0;
}

int main(void) {
  const struct exploration words = {
      "watchdog: the words of an operation", begin, NULL, {wait_twice, read_once, NULL}, 3};
  const struct exploration stopping = {"watchdog: it stops", begin_to_stop, NULL, {look, stop, NULL}, 9};
  explore_good(&words);
  EXPLORE_WEAKER(&words, record.number, STORES);
  EXPLORE_WEAKER(&words, record.summary, STORES);
  EXPLORE_WEAKER(&words, record.summary, LOADS);
  explore_good(&stopping);
  EXPLORE_WEAKER(&stopping, watching, STORES);
  EXPLORE_WEAKER(&stopping, polling, LOADS);
  return explore_result();
}
