#include "mpi/deadlines.h"

#include <sched.h>

#include "execute/agreement.h"
#include "mpi/complete.h"
#include "observe/watchdog.h"

/* Until a request is done: NULL; or the error, of the deadline or of ranks that have started something else. */
static ffi_error *await_request(struct call *c, struct request *request, int64_t run, double deadline) {
  struct watched *record = watchdog_begin_summary(request->summary, SUMMARY_WORDS);
  const char *why = deadline_refused(c, request, run);
  bool may = why == NULL;
  ffi_error *error = NULL;
  struct own_words own = call_speak_for(c, request);
  watchdog_cannot_raise(why);
  while (error == NULL && !is_request_done(request)) {
    if (agreement_is_open(request->comm)) error = compare_started(c, request->comm, false);
    if (error == NULL && may && deadline_is_over(deadline)) {
      may = deadline_give_up(run, NULL);
      if (may) error = deadline_fail_request(c, request);
    }
    if (error == NULL) sched_yield();
  }
  call_speak_again(c, own);
  watchdog_end(record);
  return error;
}

ffi_error *wait_in_time(struct call *c, const struct buffer *ids, int count) {
  int64_t run = ffi_run(c->frame);
  double deadline = deadline_begin();
  struct request *held[MAX_BUFFERS];
  ffi_error *error = NULL;
  for (int i = 0; i < count; i++) held[i] = request_hold(&ids[i]);
  for (int i = 0; i < count && error == NULL; i++)
    if (held[i] != NULL) error = await_request(c, held[i], run, deadline);
  for (int i = 0; i < count; i++)
    if (held[i] != NULL) request_release(held[i], error != NULL);
  return error;
}
