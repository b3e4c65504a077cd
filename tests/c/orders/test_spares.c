/* What is kept for the next call: requests and scratch memory go from thread to thread without a lock. */
#include <stdlib.h>

#include "explore.h"

#define free explore_free
#include "execute/chunks.c"
#include "requests/table.c"

static struct request requests[2];

/* The first place has a request. */
static void begin(void) {
  for (int i = 0; i < SPARE_REQUESTS; i++) atomic_store(&spares[i], NULL);
  for (int i = 0; i < 2; i++) requests[i] = (struct request){.serial = 0, .place = i};
  atomic_store(&spares[0], &requests[0]);
  struct scratch *scratch = explore_calloc(1, sizeof *scratch + 8);
  scratch->bytes = 8;
  atomic_store(&spare, scratch);
}

/* Nobody else uses what this thread has taken. */
static void use(struct request *request) {
  if (request == NULL) return;
  request->serial++;
  request->serial++;
  REQUIRE(spare_give(request));
}
static void take_and_give(void) { use(spare_take()); }
static void give_own(void) { use(&requests[1]), use(spare_take()); }

static void all_are_there(void) {
  int count = 0;
  for (int i = 0; i < SPARE_REQUESTS; i++) count += atomic_load(&spares[i]) != NULL;
  REQUIRE(count == 2 && requests[0].serial % 2 == 0 && requests[1].serial >= 2);
}

static void use_scratch(void) {
  struct scratch *scratch = scratch_take(8);
  scratch->data[0]++;
  scratch_give(scratch);
}

int main(void) {
  const struct exploration of_requests = {
      "spares: requests", begin, all_are_there, {take_and_give, give_own, take_and_give}, 2};
  const struct exploration of_scratch = {"spares: scratch memory", begin, NULL, {use_scratch, use_scratch}, 9};
  explore_good(&of_requests);
  EXPLORE_WEAKER(&of_requests, spares, STORES);
  EXPLORE_WEAKER(&of_requests, spares, LOADS);
  explore_good(&of_scratch);
  EXPLORE_WEAKER(&of_scratch, spare, STORES);
  return explore_result();
}
