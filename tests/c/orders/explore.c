#include "explore.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, PLACES = 96, VALUES = 64, CHOICES = 1 << 12, BYTES = 1 << 14, REGIONS = 64, MOST_WEAK = 4 };
enum { RELAXED, CONSUME, ACQUIRE, RELEASE, ACQUIRE_RELEASE, SEQUENTIAL };

/* What a thread knows: the newest value of each place, how far it is ordered behind the others, and up to which
 * position in the order of sequentially consistent accesses. */
struct knowledge {
  uint16_t newest[PLACES];
  uint32_t clock[THREADS];
  int position;
};

/* An atomic object, with all values that it has had. */
struct place {
  char *address;
  int bytes, count;
  struct {
    uint64_t number;
    bool sequential;        /* stored by a sequentially consistent access, */
    int position;           /* with this position in their order; 0: none yet */
    struct knowledge known; /* to whoever acquires it */
  } values[VALUES];
};

/* What a thread has stored by its last access that was sequentially consistent: it has a position in their order once
 * another such access sees it, or comes after it in the same thread. What else the thread stores may be seen before. */
struct stored {
  struct place *place;
  int value;
};

/* A byte of plain memory: when each thread has read and written it last. */
struct byte {
  const char *address;
  uint32_t read[THREADS], written[THREADS];
};

struct region {
  char *address;
  size_t bytes;
  int maker, freer; /* -1: not yet */
  uint32_t made;
  uint32_t used[THREADS];
};

static struct {
  const struct exploration *of;
  sem_t turn[THREADS], over;
  bool exploring, ending, done[THREADS], waits[THREADS];
  int preemptions, steps, position;
  struct knowledge known[THREADS];
  struct stored stored[THREADS];
  const char *bad;
  char text[256];
  /* What was chosen, of how many; the rest of the execution follows. */
  struct {
    int chosen, of;
  } choices[CHOICES];
  int depth, recorded;
} now;

static struct place places[PLACES];
static struct byte bytes_of[BYTES], *used_bytes[BYTES];
static struct region regions[REGIONS];
static int place_count, region_count, byte_count;
static struct {
  const char *first, *end;
  int accesses;
} weak[MOST_WEAK];
static int weak_count, failures;
static _Thread_local int self = -1;

static void fail_internally(const char *text) {
  fprintf(stderr, "explore: %s\n", text);
  exit(2);
}

static void tell_bad(const char *format, const char *text) {
  if (now.bad != NULL) return;
  snprintf(now.text, sizeof now.text, format, text);
  now.bad = now.text;
}

void explore_require(bool condition, const char *text) {
  if (!condition) tell_bad("not so: %s", text);
}

/* --- choices --- */

static int choose(int of) {
  if (of <= 1) return 0;
  if (now.depth == CHOICES) fail_internally("too many choices in one execution");
  if (now.depth == now.recorded) {
    now.choices[now.recorded].chosen = 0;
    now.choices[now.recorded++].of = of;
  }
  if (now.choices[now.depth].of != of) fail_internally("an execution is not as it was before");
  return now.choices[now.depth++].chosen;
}

/* False: nothing else can be chosen. */
static bool choose_otherwise(void) {
  while (now.recorded > 0 && now.choices[now.recorded - 1].chosen + 1 == now.choices[now.recorded - 1].of)
    now.recorded--;
  if (now.recorded > 0) now.choices[now.recorded - 1].chosen++;
  return now.recorded > 0;
}

/* --- whose turn it is --- */

static bool can_run(int thread, bool even_waiting) {
  return now.of->threads[thread] != NULL && !now.done[thread] && (even_waiting || !now.waits[thread]);
}

static void give_turn(void) {
  int able[THREADS], count = 0;
  for (int even_waiting = 0; even_waiting < 2 && count == 0; even_waiting++)
    for (int i = 0; i < THREADS; i++) {
      int thread = (self + i + now.waits[self]) % THREADS; /* the one that runs comes first; last, if it waits */
      if (can_run(thread, even_waiting)) able[count++] = thread;
    }
  if (count == 0) {
    sem_post(&now.over);
    return;
  }
  bool goes_on = able[0] == self;
  if (goes_on && now.preemptions == now.of->preemptions) count = 1;
  int next = able[choose(count)];
  if (goes_on && next != self) now.preemptions++;
  if (next == self) return;
  int me = self;
  bool done = now.done[me];
  sem_post(&now.turn[next]);
  if (!done) sem_wait(&now.turn[me]);
}

static void before_step(void) {
  if (++now.steps > 10000) fail_internally("an execution does not end");
  give_turn();
}

void explore_pause(void) {
  if (self < 0) return;
  now.waits[self] = true;
  give_turn();
  now.waits[self] = false;
  for (int i = 0; i < place_count; i++) now.known[self].newest[i] = (uint16_t)(places[i].count - 1);
}

static void *run_thread(void *number) {
  self = (int)(intptr_t)number;
  for (;;) {
    sem_wait(&now.turn[self]);
    if (now.ending) return NULL;
    now.of->threads[self]();
    now.done[self] = true;
    give_turn();
  }
}

/* --- plain memory --- */

static bool is_known(int thread, uint32_t clock) { return thread == self || now.known[self].clock[thread] >= clock; }

static void use_region(const char *address) {
  for (int i = 0; i < region_count; i++) {
    struct region *region = &regions[i];
    if (address < region->address || address >= region->address + region->bytes) continue;
    if (region->freer >= 0) tell_bad("memory is used after it was freed%s", "");
    if (region->maker >= 0 && !is_known(region->maker, region->made))
      tell_bad("memory is used before it is made%s", "");
    region->used[self] = now.known[self].clock[self];
  }
}

static struct byte *byte_at(const char *address) {
  size_t at = ((uintptr_t)address * UINT64_C(0x9e3779b97f4a7c15) >> 32) % BYTES;
  for (int i = 0; i < BYTES; i++, at = (at + 1) % BYTES) {
    if (bytes_of[at].address == address) return &bytes_of[at];
    if (bytes_of[at].address != NULL) continue;
    bytes_of[at].address = address;
    return used_bytes[byte_count++] = &bytes_of[at];
  }
  fail_internally("too much memory is used");
  return NULL;
}

/* Of an atomic access only whether it comes after the plain ones. */
static void use_bytes(const void *address, size_t bytes, bool writes, bool atomic) {
  if (self < 0 || !now.exploring) return;
  use_region(address);
  for (size_t i = 0; i < bytes; i++) {
    struct byte *byte = byte_at((const char *)address + i);
    for (int thread = 0; thread < THREADS; thread++) {
      bool raced = byte->written[thread] > 0 && !is_known(thread, byte->written[thread]);
      raced |= writes && byte->read[thread] > 0 && !is_known(thread, byte->read[thread]);
      if (raced) tell_bad("a data race: %s", writes ? "a write, and another access" : "a read, and a write");
    }
    if (!atomic) (writes ? byte->written : byte->read)[self] = now.known[self].clock[self];
  }
}

static struct region *new_region(void *memory, size_t bytes) {
  if (region_count == REGIONS) fail_internally("too many pieces of memory");
  struct region *region = &regions[region_count++];
  *region = (struct region){.address = memory, .bytes = bytes, .maker = self, .freer = -1};
  if (self >= 0) region->made = now.known[self].clock[self];
  return region;
}

void *explore_calloc(size_t count, size_t bytes) {
  void *made = calloc(count, bytes);
  if (made == NULL) fail_internally("no memory");
  new_region(made, count * bytes);
  return made;
}

void explore_free(void *memory) {
  for (int i = 0; i < region_count && self >= 0; i++) {
    struct region *region = &regions[i];
    if (region->address != memory) continue;
    use_region(memory);
    for (int thread = 0; thread < THREADS; thread++)
      if (!is_known(thread, region->used[thread])) tell_bad("memory is freed while it is used%s", "");
    region->freer = self;
  }
}

void *explore_memcpy(void *to, const void *from, size_t bytes) {
  use_bytes(from, bytes, false, false);
  use_bytes(to, bytes, true, false);
  return memcpy(to, from, bytes);
}

/* --- atomic objects --- */

static uint64_t number_at(const void *address, int bytes) {
  uint64_t number = 0;
  memcpy(&number, address, (size_t)bytes); /* little-endian */
  return number;
}

static struct place *place_at(void *address, int bytes) {
  struct place *place = places;
  while (place < places + place_count && place->address != address) place++;
  if (place < places + place_count) return place;
  if (place_count == PLACES) fail_internally("too many atomic objects");
  place_count++;
  place->address = address;
  place->bytes = bytes;
  place->count = 1;
  place->values[0].number = number_at(address, bytes);
  place->values[0].sequential = false;
  place->values[0].position = 0;
  memset(&place->values[0].known, 0, sizeof place->values[0].known);
  return place;
}

static void learn(struct knowledge *who, const struct knowledge *what) {
  for (int i = 0; i < PLACES; i++)
    if (what->newest[i] > who->newest[i]) who->newest[i] = what->newest[i];
  for (int i = 0; i < THREADS; i++)
    if (what->clock[i] > who->clock[i]) who->clock[i] = what->clock[i];
  if (what->position > who->position) who->position = what->position;
}

/* This thread's next access comes after this value in the order of those that are sequentially consistent. */
static void come_after(struct place *place, int value) {
  int *position = &place->values[value].position;
  if (!place->values[value].sequential) return;
  if (*position == 0) *position = ++now.position;
  if (*position > now.known[self].position) now.known[self].position = *position;
}

static void order_stored(void) {
  struct stored *stored = &now.stored[self];
  if (stored->place != NULL) come_after(stored->place, stored->value);
  stored->place = NULL;
}

static int order_of(const void *address, int order, enum explore_access access) {
  for (int i = 0; i < weak_count; i++)
    if ((const char *)address >= weak[i].first && (const char *)address < weak[i].end &&
        (weak[i].accesses & (int)access) != 0)
      return RELAXED;
  order &= 0x7f;
  if (order == SEQUENTIAL) order_stored();
  return order;
}

static bool acquires(int order) { return order != RELAXED && order != RELEASE; }
static bool releases(int order) { return order >= RELEASE; }

static void see(struct place *place, int value, int order) {
  if (order == SEQUENTIAL) come_after(place, value);
  now.known[self].newest[place - places] = (uint16_t)value;
  if (acquires(order)) learn(&now.known[self], &place->values[value].known);
}

/* The oldest value that this thread may see. */
static int oldest(const struct place *place, int order) {
  int seen = now.known[self].newest[place - places];
  for (int value = place->count - 1; value > seen && order == SEQUENTIAL; value--)
    if (place->values[value].position > 0 && place->values[value].position <= now.known[self].position) return value;
  return seen;
}

/* `replaced`: -1, or the value that it takes the place of in one step, whose releases it then passes on. */
static void put(struct place *place, uint64_t number, int order, int replaced) {
  if (place->count == VALUES) fail_internally("too many values of an atomic object");
  int value = place->count++;
  struct knowledge *known = &place->values[value].known, *own = &now.known[self];
  place->values[value].number = number;
  own->newest[place - places] = (uint16_t)value;
  memset(known, 0, sizeof *known);
  if (releases(order)) *known = *own;
  known->newest[place - places] = (uint16_t)value;
  if (replaced >= 0) learn(known, &place->values[replaced].known);
  place->values[value].sequential = order == SEQUENTIAL;
  place->values[value].position = 0;
  if (order == SEQUENTIAL) now.stored[self] = (struct stored){place, value};
  own->clock[self]++;
  memcpy(place->address, &number, (size_t)place->bytes);
}

static bool explored(const void *address, int bytes, bool writes) {
  if (self < 0 || !now.exploring) return false;
  before_step();
  use_bytes(address, (size_t)bytes, writes, true);
  return true;
}

static uint64_t load(void *address, int bytes, int order) {
  if (!explored(address, bytes, false)) return number_at(address, bytes);
  struct place *place = place_at(address, bytes);
  order = order_of(address, order, EXPLORE_LOADS);
  int value = place->count - 1 - choose(place->count - oldest(place, order));
  see(place, value, order);
  return place->values[value].number;
}

static void store(void *address, int bytes, uint64_t number, int order) {
  if (!explored(address, bytes, true))
    memcpy(address, &number, (size_t)bytes);
  else
    put(place_at(address, bytes), number, order_of(address, order, EXPLORE_STORES), -1);
}

enum change { EXCHANGE, ADD, SUBTRACT };
static uint64_t changed(uint64_t number, enum change change, uint64_t by) {
  return change == ADD ? number + by : change == SUBTRACT ? number - by : by;
}

/* Sees the newest value, and replaces it. */
static uint64_t replace(void *address, int bytes, enum change change, uint64_t by, int order) {
  if (!explored(address, bytes, true)) {
    uint64_t before = number_at(address, bytes), after = changed(before, change, by);
    memcpy(address, &after, (size_t)bytes);
    return before;
  }
  struct place *place = place_at(address, bytes);
  int last = place->count - 1;
  uint64_t before = place->values[last].number;
  see(place, last, order_of(address, order, EXPLORE_LOADS));
  put(place, changed(before, change, by), order_of(address, order, EXPLORE_STORES), last);
  return before;
}

/* Succeeds with the newest value; fails with that, or an older one, which is not as expected. */
static bool compare(void *address, int bytes, void *expected, uint64_t number, int order, int otherwise) {
  uint64_t wanted = number_at(expected, bytes);
  if (!explored(address, bytes, true)) {
    bool same = number_at(address, bytes) == wanted;
    memcpy(same ? address : expected, same ? &number : (void *)address, (size_t)bytes);
    return same;
  }
  struct place *place = place_at(address, bytes);
  int able[VALUES], count = 0, last = place->count - 1;
  int orders[] = {order_of(address, otherwise, EXPLORE_LOADS), order_of(address, order, EXPLORE_LOADS)};
  for (int value = last; value >= oldest(place, orders[false]); value--)
    if (value == last || place->values[value].number != wanted) able[count++] = value;
  int value = able[choose(count)];
  bool same = place->values[value].number == wanted;
  see(place, value, orders[same]);
  if (same)
    put(place, number, order_of(address, order, EXPLORE_STORES), last);
  else
    memcpy(expected, &place->values[value].number, (size_t)bytes);
  return same;
}

/* --- what the compiler calls --- */

void __tsan_init(void) {}
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void) {}
void __tsan_read_range(void *address, size_t bytes) { use_bytes(address, bytes, false, false); }
void __tsan_write_range(void *address, size_t bytes) { use_bytes(address, bytes, true, false); }

/* By newer versions of clang. */
void *__tsan_memcpy(void *to, const void *from, size_t bytes) { return explore_memcpy(to, from, bytes); }
void *__tsan_memmove(void *to, const void *from, size_t bytes) {
  use_bytes(from, bytes, false, false);
  use_bytes(to, bytes, true, false);
  return memmove(to, from, bytes);
}
void *__tsan_memset(void *to, int value, size_t bytes) {
  use_bytes(to, bytes, true, false);
  return memset(to, value, bytes);
}

#define PLAIN(bytes)                                                                            \
  void __tsan_read##bytes(void *address) { use_bytes(address, bytes, false, false); }           \
  void __tsan_write##bytes(void *address) { use_bytes(address, bytes, true, false); }           \
  void __tsan_unaligned_read##bytes(void *address) { use_bytes(address, bytes, false, false); } \
  void __tsan_unaligned_write##bytes(void *address) { use_bytes(address, bytes, true, false); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

#define CHANGE(bits, type, name, change)                            \
  type __tsan_atomic##bits##_##name(type *at, type by, int order) { \
    return (type)replace(at, sizeof *at, change, by, order);        \
  }
#define COMPARE(bits, type, name)                                                                                     \
  int __tsan_atomic##bits##_compare_exchange_##name(type *at, type *expected, type value, int order, int otherwise) { \
    return compare(at, sizeof *at, expected, value, order, otherwise);                                                \
  }
#define ATOMIC(bits, type)                                                                                         \
  CHANGE(bits, type, exchange, EXCHANGE)                                                                           \
  CHANGE(bits, type, fetch_add, ADD)                                                                               \
  CHANGE(bits, type, fetch_sub, SUBTRACT)                                                                          \
  COMPARE(bits, type, strong)                                                                                      \
  COMPARE(bits, type, weak)                                                                                        \
  void __tsan_atomic##bits##_store(type *at, type value, int order) { store(at, sizeof *at, value, order); }       \
  type __tsan_atomic##bits##_load(const type *at, int order) {                                                     \
    return (type)load((void *)(uintptr_t)at, sizeof *at, order);                                                   \
  }                                                                                                                \
  type __tsan_atomic##bits##_compare_exchange_val(type *at, type expected, type value, int order, int otherwise) { \
    compare(at, sizeof *at, &expected, value, order, otherwise);                                                   \
    return expected;                                                                                               \
  }
ATOMIC(8, uint8_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)

/* --- explorations --- */

static void forget_execution(void) {
  place_count = 0;
  while (byte_count > 0) memset(used_bytes[--byte_count], 0, sizeof **used_bytes);
  for (int i = 0; i < region_count; i++) free(regions[i].address);
  region_count = 0;
  memset(now.known, 0, sizeof now.known);
  memset(now.stored, 0, sizeof now.stored);
  for (int i = 0; i < THREADS; i++) now.known[i].clock[i] = 1;
  for (int i = 0; i < THREADS; i++) now.done[i] = now.waits[i] = false;
  now.preemptions = now.steps = now.depth = now.position = 0;
}

static void execute(void) {
  int weak_before = weak_count; /* `begin` may add some */
  forget_execution();
  now.of->begin();
  now.exploring = true;
  int count = 0;
  while (count < THREADS && now.of->threads[count] != NULL) count++;
  sem_post(&now.turn[choose(count)]);
  sem_wait(&now.over);
  now.exploring = false;
  weak_count = weak_before;
  if (now.of->end != NULL && now.bad == NULL) now.of->end();
}

/* How many executions there are, up to the first that is bad. */
static long explore(const struct exploration *exploration) {
  pthread_t threads[THREADS];
  long count = 0;
  now.of = exploration;
  now.bad = NULL;
  now.ending = false;
  now.recorded = 0;
  sem_init(&now.over, 0, 0);
  for (int i = 0; i < THREADS; i++) sem_init(&now.turn[i], 0, 0);
  for (int i = 0; i < THREADS; i++)
    if (pthread_create(&threads[i], NULL, run_thread, (void *)(intptr_t)i) != 0) fail_internally("no thread");
  do {
    execute();
    count++;
  } while (now.bad == NULL && choose_otherwise());
  now.ending = true;
  for (int i = 0; i < THREADS; i++) sem_post(&now.turn[i]);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  return count;
}

void explore_weaken(const void *first, size_t bytes, enum explore_access accesses) {
  if (weak_count == MOST_WEAK) fail_internally("too many weaker orders");
  weak[weak_count].first = first;
  weak[weak_count].end = weak[weak_count].first + bytes;
  weak[weak_count++].accesses = accesses;
}

void explore_good(const struct exploration *exploration) {
  long count = explore(exploration);
  failures += now.bad != NULL;
  printf("%s: %s: %ld executions%s%s\n", now.bad == NULL ? "good" : "FAILED", exploration->name, count,
         now.bad == NULL ? "" : ", the last one bad: ", now.bad == NULL ? "" : now.bad);
}

void explore_bad(const struct exploration *exploration, const char *weaker) {
  long count = explore(exploration);
  failures += now.bad == NULL;
  printf("%s: %s, with %s: %ld executions, %s\n", now.bad != NULL ? "good" : "FAILED", exploration->name, weaker, count,
         now.bad != NULL ? now.bad : "none of them bad");
  weak_count = 0;
}

int explore_result(void) { return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE; }
