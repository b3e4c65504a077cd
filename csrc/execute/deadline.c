#include "execute/deadline.h"

#include <inttypes.h>
#include <string.h>

#include "core/failure.h"
#include "core/plan.h"
#include "observe/watchdog.h"

atomic_bool deadlines;
static _Atomic double limit; /* in seconds */

static const char *const of_device = "its array is on a device, whose stream goes on after an error",
                         *const of_no_run = "XLA does not tell to which run of a function it belongs",
                         *const of_derivative =
                             "it belongs to a derivative, other messages of which have been exchanged",
                         *const of_pytree = "other arrays of its pytree have been received already",
                         *const of_pytree_sent = "the other arrays of its pytree would not be sent any more",
                         *const of_function =
                             "it was started in the same compiled function, after whose error nobody could "
                             "wait for it",
                         *const of_lost =
                             "the same compiled function has received other messages, which would be lost with its "
                             "results";

void deadline_configure(double seconds) {
  atomic_store(&limit, seconds);
  atomic_store(&deadlines, seconds > 0);
}

double deadline_begin(void) { return seconds_now() + atomic_load(&limit); }

bool deadline_is_over(double deadline) { return seconds_now() >= deadline; }

/* An attribute by its name; `otherwise` if there is none. */
static int64_t attribute_named(const struct call *call, const char *name, int64_t otherwise) {
  for (int i = 0; i < call->operation->attribute_count; i++)
    if (strcmp(call->operation->attributes[i].name, name) == 0) return call->attributes[i];
  return otherwise;
}

/* --- what runs have done --- */

/* Each with what it has done, in the place that its number gives; of two in one place the later one is remembered. XLA
 * gives the numbers of a program one after another, so that they are far apart which are in one place. */
static struct {
  _Atomic int64_t run; /* 0: none */
  _Atomic int done;
} runs[1 << 16];
enum { NOTHING, COMMUNICATED, RECEIVED };

static inline size_t place_of_run(int64_t run) { return (uint64_t)run % (sizeof runs / sizeof *runs); }

static int done_by(int64_t run) {
  size_t at = place_of_run(run);
  return atomic_load(&runs[at].run) == run ? atomic_load(&runs[at].done) : NOTHING;
}

/* What would be lost if a call were the last of its run to succeed. */
static int done_in(const struct call *call) {
  int nobody = runtime.abi->proc_null, row = call->operation->row;
  if (row == ROW_wait) return call->first[2] > call->first[1] ? RECEIVED : NOTHING;
  if (waits_for_exchange(row)) return RECEIVED;
  if ((row == ROW_recv || row == ROW_sendrecv) && attribute_named(call, "source", nobody) != nobody) return RECEIVED;
  if (row == ROW_recv) return NOTHING;
  return row == ROW_irecv || row == ROW_hold || row == ROW_after || row == ROW_check ? NOTHING : COMMUNICATED;
}

void deadline_note_done(const struct call *call) {
  int64_t run = ffi_run(call->frame);
  int done = done_in(call), before = done_by(run);
  size_t at = place_of_run(run);
  if (run == 0 || done <= before) return;
  atomic_store(&runs[at].run, run);
  atomic_store(&runs[at].done, done);
}

/* --- what may end with an error --- */

static bool is_of_derivative(const struct operation *operation, const int64_t attributes[]) {
  for (int i = 0; i < operation->attribute_count; i++) {
    enum attribute kind = operation->attributes[i].kind;
    bool differs = (kind == KIND_DERIVATIVE || kind == KIND_ADJOINT) && attributes[i] != 0;
    if (differs || (kind == KIND_TAG && attributes[i] >= derivatives_tag())) return true;
  }
  return false;
}

static const char *why_refused(const struct call *call, int64_t run) {
  if (!call->memory->host || call->frame == NULL) return of_device;
  if (run == 0) return of_no_run;
  return done_by(run) == RECEIVED ? of_lost : NULL;
}

static const char *refused_receive(const struct call *call) {
  int64_t place = call->attributes[attribute_of(call->operation, KIND_LEAF)];
  if (is_of_derivative(call->operation, call->attributes)) return of_derivative;
  if (place == LEAF_MIDDLE || place == LEAF_LAST) return of_pytree;
  if (place == LEAF_FIRST && call->operation->row == ROW_sendrecv) return of_pytree_sent;
  return why_refused(call, ffi_run(call->frame));
}

double deadline_of_receive(const struct call *call) {
  const char *why = refused_receive(call);
  if (why == NULL) return deadline_begin();
  watchdog_cannot_raise(why);
  return 0;
}

const char *deadline_refused(const struct call *call, const struct request *request, int64_t run) {
  if (is_of_derivative(request->operation, request->attributes)) return of_derivative;
  bool of_run = run != 0 && request->run == run;
  return of_run && request->operation->row != ROW_irecv ? of_function : why_refused(call, run);
}

bool deadline_give_up(int64_t run, struct receive *own) {
  bool may = requests_give_up(run, own);
  if (!may) watchdog_cannot_raise(of_lost);
  return may;
}

/* --- errors --- */

static void add_number(struct text *text, const char *before, const char *any, const char *one, int64_t number,
                       int64_t any_number) {
  if (number == any_number)
    text_add(text, " %s %s", before, any);
  else
    text_add(text, " %s %s %" PRId64, before, one, number);
}

/* Which message has not come; where that was called. */
static void add_message(struct text *text, const struct call *call) {
  int any_source = runtime.abi->any_source, any_tag = runtime.abi->any_tag;
  int64_t tag = attribute_named(call, "tag", any_tag);
  text_add(text, "no message");
  add_number(text, "from", "any rank", "rank", attribute_named(call, "source", any_source), any_source);
  add_number(text, "with", "any tag", "tag", attribute_named(call, "recvtag", tag), any_tag);
  text_add(text, " has come");
}

static void add_time(struct text *text, const int64_t summary[SUMMARY_WORDS]) {
  text_add(text, " within %.3g s (JAXMPI_TIMEOUT)", atomic_load(&limit));
  summary_add_call_sites(text, ", called at ", summary);
}

static void add_done(struct text *text, const struct call *call) {
  if (done_by(ffi_run(call->frame)) == COMMUNICATED)
    text_add(text, ". This function has communicated before, and would do that again if it were called again");
}

static const char *const advice =
    ". What other ranks do instead is told with JAXMPI_TIMEOUT_ACTION=report; a longer JAXMPI_TIMEOUT waits longer";

ffi_error *deadline_fail(const struct call *call) {
  char characters[TEXT_BYTES];
  struct text text = text_in(characters, sizeof characters);
  int64_t summary[SUMMARY_WORDS] = {0};
  summarize(call, summary);
  add_message(&text, call);
  add_time(&text, summary);
  if (call->operation->row == ROW_sendrecv)
    text_add(&text,
             ". What it sends to rank %" PRId64 " with tag %" PRId64
             " is under way, and is not taken back: receive a message that comes later by recv, and send nothing again",
             attribute_named(call, "dest", 0), attribute_named(call, "sendtag", 0));
  else
    text_add(&text, ". A message that comes later can be received, by the same call for example");
  add_done(&text, call);
  return call_fail(call, FFI_DEADLINE_EXCEEDED, "%s%s", text.characters, advice);
}

ffi_error *deadline_fail_request(const struct call *call, const struct request *request) {
  char characters[TEXT_BYTES];
  struct text text = text_in(characters, sizeof characters);
  bool receives = request->operation->row == ROW_irecv;
  if (receives)
    add_message(&text, call);
  else
    text_add(&text, "it is not done");
  add_time(&text, request->summary);
  if (request->run != ffi_run(call->frame))
    text_add(&text, ". The request is as it was: wait for it again");
  else
    text_add(&text, ". A message that comes later can be received, by the same function for example");
  add_done(&text, call);
  return call_fail(call, FFI_DEADLINE_EXCEEDED, "%s%s", text.characters, advice);
}
