/* The registry: objects are looked up by their numbers while others are added. */
#include <stdlib.h>

#include "explore.h"

#define calloc explore_calloc
#include "core/registry.c"

enum { MEANT = 41, OWN = 42, LATER = 43 };
static int meant, own, later;
static int64_t number_of_meant, number_of_own, number_of_later;

/* One entry is reserved; one is left in the first block. */
static void begin(void) {
  blocks[0] = blocks[1] = NULL;
  atomic_store(&registered, 0);
  meant = own = later = 0;
  registry_begin(7);
  number_of_meant = registry_reserve("meant");
  atomic_store(&registered, BLOCK - 1);
  number_of_own = (int64_t)7 << PLACE_BITS | BLOCK;
  number_of_later = number_of_own + 1;
}

static void add(void) {
  meant = MEANT;
  registry_add(&meant, "meant");
  own = OWN;
  registry_add(&own, NULL);
  later = LATER;
  registry_add(&later, NULL);
}

static void look_up(void) {
  const int *found_later = registry_at(number_of_later), *found_own = registry_at(number_of_own),
            *found_meant = registry_at(number_of_meant);
  REQUIRE(found_meant == NULL || *found_meant == MEANT);
  REQUIRE(found_own == NULL || *found_own == OWN);
  REQUIRE(found_later == NULL || (*found_later == LATER && found_own != NULL && found_meant != NULL));
}

static void look_for_meant(void) {
  const int *found = registry_at(number_of_meant);
  REQUIRE(found == NULL || *found == MEANT);
}

/* The entry that is reserved gets its object with a weaker order. */
static void begin_weaker(void) {
  begin();
  explore_weaken(&blocks[0][0].object, sizeof blocks[0][0].object, EXPLORE_STORES);
}

int main(void) {
  struct exploration lookup = {"registry: look up while others add", begin, NULL, {add, look_up, look_up}, 2};
  struct exploration of_meant = {"registry: an entry that is reserved", begin, NULL, {add, look_for_meant, NULL}, 9};
  explore_good(&lookup);
  EXPLORE_WEAKER(&lookup, registered, STORES);
  EXPLORE_WEAKER(&lookup, registered, LOADS);
  explore_good(&of_meant);
  of_meant.begin = begin_weaker;
  explore_bad(&of_meant, "its object stored relaxed");
  return explore_result();
}
