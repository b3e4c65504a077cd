/* The explorer itself: of programs whose answer is known from C's memory model, it finds what may happen, and nothing
 * that may not. They have their usual names (Alglave, Maranget, Tautschnig: Herding Cats). */
#include <stdatomic.h>

#include "explore.h"

enum { RELAXED, ACQUIRE_RELEASE, SEQUENTIAL, MODES };
static const memory_order loads[] = {memory_order_relaxed, memory_order_acquire, memory_order_seq_cst};
static const memory_order stores[] = {memory_order_relaxed, memory_order_release, memory_order_seq_cst};
static int mode, data, seen[4];
static atomic_int x, y;

static int load(const atomic_int *of) { return atomic_load_explicit(of, loads[mode]); }
static void store(atomic_int *to, int value) { atomic_store_explicit(to, value, stores[mode]); }

static void begin(void) {
  data = 0;
  for (int i = 0; i < 4; i++) seen[i] = -1;
  atomic_store(&x, 0);
  atomic_store(&y, 0);
}

/* MP: what is behind a flag; with plain data, and with atomic. */
static void publish_plain(void) { data = 1, store(&x, 1); }
static void read_plain(void) { REQUIRE(load(&x) == 0 || data == 1); }
static void publish(void) { atomic_store_explicit(&y, 1, memory_order_relaxed), store(&x, 1); }
static void read(void) { REQUIRE(load(&x) == 0 || atomic_load_explicit(&y, memory_order_relaxed) == 1); }

/* The same by way of a third thread (ISA2), and where that adds to the flag. */
static void pass_on(void) {
  if (load(&x) == 1) store(&y, 1);
}
static void read_passed(void) { REQUIRE(load(&y) == 0 || data == 1); }
static void add(void) { atomic_fetch_add_explicit(&x, 1, memory_order_relaxed); }
static void read_added(void) { REQUIRE(load(&x) < 2 || data == 1); }

/* SB: each stores, and then looks at what the other has stored. */
static void store_x(void) { store(&x, 1), seen[0] = load(&y); }
static void store_y(void) { store(&y, 1), seen[1] = load(&x); }
static void one_has_seen(void) { REQUIRE(seen[0] == 1 || seen[1] == 1); }

/* IRIW: two see two stores in different orders. */
static void only_x(void) { store(&x, 1); }
static void only_y(void) { store(&y, 1); }
static void x_then_y(void) { seen[0] = load(&x), seen[1] = load(&y); }
static void y_then_x(void) { seen[2] = load(&y), seen[3] = load(&x); }
static void one_order(void) { REQUIRE(!(seen[0] == 1 && seen[1] == 0 && seen[2] == 1 && seen[3] == 0)); }

/* CoRR: nobody sees an older value after a newer one. */
static void twice(void) { store(&x, 1), store(&x, 2); }
static void never_back(void) {
  int first = load(&x);
  REQUIRE(load(&x) >= first);
}

/* A relaxed store may be seen before a sequentially consistent one that it comes after. */
static void sequential_first(void) { atomic_store(&x, 1), atomic_store_explicit(&y, 1, memory_order_relaxed); }
static void relaxed_seen(void) { REQUIRE(atomic_load(&y) == 0 || atomic_load(&x) == 1); }

/* Nor need a sequentially consistent load see what was so stored before what a relaxed load has seen. */
static void both_sequential(void) { atomic_store(&x, 1), atomic_store(&y, 1); }
static void seen_relaxed(void) { REQUIRE(atomic_load_explicit(&y, memory_order_relaxed) == 0 || atomic_load(&x) == 1); }

/* Additions are never lost. */
static void sum(void) { REQUIRE(atomic_load(&x) == 2); }

int main(void) {
  enum { ALL = 99 };
  const struct {
    struct exploration exploration;
    int good_from; /* the weakest orders with which it is good */
  } programs[] = {
      {{"MP, plain data", begin, NULL, {publish_plain, read_plain}, ALL}, ACQUIRE_RELEASE},
      {{"MP", begin, NULL, {publish, read}, ALL}, ACQUIRE_RELEASE},
      {{"ISA2", begin, NULL, {publish_plain, pass_on, read_passed}, ALL}, ACQUIRE_RELEASE},
      {{"MP, one adds between", begin, NULL, {publish_plain, add, read_added}, ALL}, ACQUIRE_RELEASE},
      {{"SB", begin, one_has_seen, {store_x, store_y}, ALL}, SEQUENTIAL},
      {{"IRIW", begin, one_order, {only_x, only_y, x_then_y, y_then_x}, 3}, SEQUENTIAL},
      {{"CoRR", begin, NULL, {twice, never_back}, ALL}, RELAXED},
      {{"additions", begin, sum, {add, add}, ALL}, RELAXED},
      {{"a relaxed store after a sequential one", begin, NULL, {sequential_first, relaxed_seen}, ALL}, MODES},
      {{"a sequential load after a relaxed one", begin, NULL, {both_sequential, seen_relaxed}, ALL}, MODES},
  };
  static const char *const names[] = {"relaxed", "acquire and release", "seq_cst"};
  for (unsigned i = 0; i < sizeof programs / sizeof *programs; i++)
    for (mode = RELAXED; mode < MODES; mode++)
      if (mode >= programs[i].good_from)
        explore_good(&programs[i].exploration);
      else
        explore_bad(&programs[i].exploration, names[mode]);
  return explore_result();
}
