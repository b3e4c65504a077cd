/* Waiting for requests until a deadline: see core/deadline.h. Compiled once per ABI. */
#include "core/deadline.h"

#include <sched.h>

#include "core/watch.h"
#include "mpi/bodies.h"

/* Until a request is done. False: the deadline is over, and an error may be raised. */
static bool await_request(const struct call *c, struct request *request, int64_t run, double deadline) {
  struct watched *record = watch_begin_words(request->words, WORDS);
  const char *why = deadline_refused(c, request, run);
  watch_cannot_raise(why);
  bool done, over = false;
  while (!(done = request_done(request)) && !over) {
    over = why == NULL && deadline_is_over(deadline);
    if (over && request->run == run && request_is_behind(request)) {
      why =
          "an earlier message with its rank and tag has been received in the same compiled function, and would be lost";
      watch_cannot_raise(why);
      over = false;
    }
    sched_yield();
  }
  watch_end(record);
  return done;
}

/* The error, in the words of what has been started. */
static ffi_error *fail(struct call *c, const struct request *request, int64_t run) {
  const struct operation *own = c->operation;
  short buffers = c->buffer_count;
  c->operation = request->operation;
  c->buffer_count = 0;
  memcpy(c->attributes, request->attributes, sizeof c->attributes);
  ffi_error *error = deadline_fail_request(c, request, request->run != run, requests_received(run));
  c->operation = own, c->buffer_count = buffers;
  return error;
}

ffi_error *wait_in_time(struct call *c, const struct buffer *ids, int count) {
  int64_t run = ffi_run(c->frame);
  double deadline = deadline_begin();
  struct request *held[MAX_BUFFERS];
  const struct request *late = NULL;
  for (int i = 0; i < count; i++) held[i] = request_hold(&ids[i]);
  for (int i = 0; i < count && late == NULL; i++)
    if (held[i] != NULL && !await_request(c, held[i], run, deadline)) late = held[i];
  ffi_error *error = late != NULL ? fail(c, late, run) : NULL;
  for (int i = 0; i < count; i++)
    if (held[i] != NULL) request_release(held[i], late != NULL);
  return error;
}
