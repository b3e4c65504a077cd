/* Flags that each call reads, and what is stored before them. */
#include <stdlib.h>
#include <string.h>

#include "core/failure.h"
#include "explore.h"

/* The text of the last error. */
static const char *text;
__attribute__((format(printf, 3, 4))) static ffi_error *note_failure(const struct call *failed, int code,
                                                                     const char *format, ...) {
  (void)failed, (void)code;
  text = format;
  return NULL;
}
#define call_fail note_failure
#include "execute/body.c"

static struct communicator comm;
static struct call call;
static char agreement;

static void begin(void) {
  text = NULL;
  memset(&comm, 0, sizeof comm);
  comm.size = 2;
  call.comm = &comm;
  call.operation = &operation_table[ROW_barrier];
}

/* As give_up in mpi/interface.c. */
static void give_up(void) {
  atomic_store(&comm.given_up, true);
  atomic_exchange(&comm.freed, true);
}

static void use_given_up(void) {
  call_check(&call);
  REQUIRE(text == NULL || strstr(text, "given up by jaxmpi.survive.recover") != NULL);
}

/* As compare in python/objects.c. */
static void prepare(void) {
  atomic_store(&comm.agreement, (struct agreement *)(void *)&agreement);
  atomic_store(&comm.to_compare, 10);
}

static void settle(void) {
  call_settle(&call);
  REQUIRE(!call.comparison.due || atomic_load(&comm.agreement) != NULL);
}

int main(void) {
  const struct exploration given_up = {
      "flags: a communicator that is given up", begin, NULL, {give_up, use_given_up}, 9};
  const struct exploration compared = {"flags: what is compared", begin, NULL, {prepare, settle}, 9};
  explore_good(&given_up);
  EXPLORE_WEAKER(&given_up, comm.freed, LOADS);
  explore_good(&compared);
  EXPLORE_WEAKER(&compared, comm.to_compare, LOADS);
  return explore_result();
}
