/* JAXMPI_TIMEOUT_ACTION=raise: which waits end with an error, and that nothing is lost by it. */
#define _GNU_SOURCE

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/failure.h"
#include "execute/compare.h"
#include "execute/deadline.h"
#include "harness.h"
#include "observe/watchdog.h"
#include "requests/progress.h"

enum { PLACE = 1, SIZE = 4, N = 7, MOST_TAG = 127, OF_DERIVATIVES = 64 };
static const double LIMIT = 0.02;

static int64_t base; /* the runs of a test have numbers from here on */
static float in[N], out[N], message[N];
static float id[2], other[2];

static struct communicator *here(void) { return world(PLACE, SIZE); }

static void prepare(void) {
  fake->reset();
  progress_patience = 100000000000000; /* the tests look for messages themselves */
  runtime.most_tag = MOST_TAG;
  deadline_configure(LIMIT);
  base += 100;
  run_number = base + 1;
  for (int i = 0; i < N; i++) in[i] = (float)i, message[i] = (float)(10 + i), out[i] = -1;
}

static void deliver(int source, int tag) { fake->deliver(here()->handle, source, tag, message, sizeof message); }

static ffi_error *receive(int source, int tag) {
  return RUN("recv", NONE, ARRAY(F32, out, N), COMM(here()), source, 0, tag);
}

static ffi_error *exchange(int dest, int tag) {
  return RUN("sendrecv", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(here()), dest, tag, tag, dest, 0);
}

static ffi_error *start(const char *operation, float *number, int tag) {
  if (strcmp(operation, "irecv") == 0) return RUN(operation, NONE, ARRAY(F32, number, 2), COMM(here()), N, F32, 2, tag);
  if (strcmp(operation, "isend") == 0)
    return RUN(operation, ARRAY(F32, in, N), ARRAY(F32, number, 2), COMM(here()), 2, tag);
  return RUN(operation, ARRAY(F32, in, N), ARRAY(F32, number, 2), COMM(here()), reduction("SUM"));
}

static ffi_error *wait_on(float *number, bool result) {
  return RUN("wait", ARRAY(F32, number, 2), result ? ARRAY(F32, out, N) : NONE, COMM(here()), 0);
}

static ffi_error *wait_for_both(void) {
  static float results[2][N];
  struct frame frame;
  struct array numbers[] = {ARRAY(F32, id, 2), ARRAY(F32, other, 2)};
  struct array made[] = {ARRAY(F32, results[0], N), ARRAY(F32, results[1], N)};
  frame_make_lists(&frame, "wait", numbers, 2, made, 2, (const int64_t[]){COMM(here()), 0});
  return frame_call(&frame, "wait");
}

static bool has_come(void) {
  bool all = CHECK_SAME(out, message, sizeof out);
  for (int i = 0; i < N; i++) out[i] = -1;
  return all;
}

static bool nothing_has_come(void) {
  bool none = true;
  for (int i = 0; i < N; i++) none = none && CHECK(out[i] == -1);
  return none;
}

static bool all_is_done(void) {
  return CHECK_EQUAL(fake->live_requests, 0) && CHECK_EQUAL(fake->live_matched, 0) && CHECK_EQUAL(fake->queued, 0) &&
         CHECK_EQUAL(requests_in_flight(), 0) && CHECK_EQUAL(queue_posted(), 0) &&
         CHECK_EQUAL(atomic_load(&here()->queued), 0);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void a_message_that_comes_later_is_received(void) {
  prepare();
  const int sources[] = {2, fake->any_source}, tags[] = {5, fake->any_tag};
  FOR_EACH (const int *, source, sources)
    FOR_EACH (const int *, tag, tags) {
      context("source %d, tag %d", *source, *tag);
      run_number++;
      double begin = now();
      FAILS(receive(*source, *tag), FFI_DEADLINE_EXCEEDED, "jaxmpi.recv on rank 1 of 4: no message from ",
            *source == 2 ? "rank 2 with " : "any rank with ", *tag == 5 ? "tag 5 has come" : "any tag has come",
            " within 0.02 s (JAXMPI_TIMEOUT)", "comes later can be received");
      CHECK(now() - begin >= LIMIT && now() - begin < 1);
      CHECK(nothing_has_come());
      deliver(2, 5);
      SUCCEEDS(receive(*source, *tag));
      CHECK(has_come());
      all_is_done();
    }
  CHECK_EQUAL(times_called("MPI_Mprobe"), 0); /* from which nothing comes back */
}

static void a_message_in_time_is_received(void) {
  prepare();
  deadline_configure(60);
  fake->unheard = 100;
  deliver(2, 5);
  SUCCEEDS(receive(2, 5));
  CHECK(has_come());
  SUCCEEDS(receive(fake->proc_null, 5));
  for (int i = 0; i < N; i++) CHECK(out[i] == 0);
  deliver(2, 5);
  SUCCEEDS(exchange(2, 5));
  CHECK(has_come());
  all_is_done();
}

static void the_line_is_told(void) {
  prepare();
  int64_t site[] = {COMM(here()), 0, 2, 0, 9};
  CHECK(call_site_add(ROW_recv, site, F32, N, "a.py:3 (f)"));
  FAILS(receive(2, 9), FFI_DEADLINE_EXCEEDED, ", called at a.py:3 (f). A message");
}

static void a_wait_can_be_repeated(void) {
  static const char *const kinds[] = {"irecv", "isend", "iallreduce"};
  FOR_EACH (const char *const *, kind, kinds) {
    bool receives = strcmp(*kind, "irecv") == 0, sends = strcmp(*kind, "isend") == 0;
    prepare();
    context("%s", *kind);
    fake->slow = 1 << 30;
    SUCCEEDS(start(*kind, id, 5));
    fake->slow = 0;
    run_number = base + 2; /* another program waits */
    for (int i = 0; i < 2; i++) {
      FAILS(wait_on(id, !sends), FFI_DEADLINE_EXCEEDED, *kind,
            "on rank 1 of 4: ", receives ? "no message from rank 2 with tag 5" : "it is not done", "wait for it again");
      CHECK_EQUAL(requests_in_flight(), 1);
      CHECK_EQUAL(queue_posted(), receives);
    }
    if (receives)
      deliver(2, 5);
    else
      deadline_configure(0);
    SUCCEEDS(wait_on(id, !sends));
    if (receives) CHECK(has_come());
    FAILS(wait_on(id, !sends), FFI_FAILED_PRECONDITION, "waited for already");
    all_is_done();
  }
}

/* A request that can be waited for again gets the message that is for it, not one that has been started later. */
static void the_order_of_receives_stays(void) {
  prepare();
  SUCCEEDS(start("irecv", id, 5));
  SUCCEEDS(start("irecv", other, 5));
  run_number = base + 2;
  FAILS(wait_on(id, true), FFI_DEADLINE_EXCEEDED, "wait for it again");
  deliver(2, 5);
  FAILS(wait_on(other, true), FFI_DEADLINE_EXCEEDED, "no message");
  for (int i = 0; i < N; i++) message[i] += 100;
  deliver(2, 5);
  SUCCEEDS(wait_on(other, true));
  CHECK(has_come());
  for (int i = 0; i < N; i++) message[i] -= 100;
  SUCCEEDS(wait_on(id, true));
  CHECK(has_come());
  all_is_done();
}

static void requests_that_are_done_are_kept(void) {
  prepare();
  SUCCEEDS(start("irecv", id, 5));
  SUCCEEDS(start("irecv", other, 6));
  run_number = base + 2;
  deliver(2, 5);
  FAILS(wait_for_both(), FFI_DEADLINE_EXCEEDED, "jaxmpi.irecv", "with tag 6");
  CHECK_EQUAL(requests_in_flight(), 2);
  SUCCEEDS(wait_on(id, true));
  CHECK(has_come());
  deliver(2, 6);
  SUCCEEDS(wait_on(other, true));
  CHECK(has_come());
  all_is_done();
}

/* Nobody can wait for what the same program has started. */
static void of_one_program_messages_are_left_to_others(void) {
  prepare();
  SUCCEEDS(start("irecv", id, 5));
  SUCCEEDS(start("irecv", other, 6));
  FAILS(wait_on(id, true), FFI_DEADLINE_EXCEEDED, "jaxmpi.irecv", "with tag 5", "comes later can be received");
  CHECK_EQUAL(queue_posted(), 0);
  run_number = base + 2;
  deliver(2, 5);
  deliver(2, 6);
  for (int tag = 5; tag < 7; tag++) {
    SUCCEEDS(receive(2, tag));
    CHECK(has_come());
  }
  FAILS(wait_on(id, true), FFI_FAILED_PRECONDITION, "waited for already");
  FAILS(wait_on(other, true), FFI_FAILED_PRECONDITION, "waited for already");
  all_is_done();
}

/* Also after an error of another kind, and without deadlines. */
static void after_any_error_messages_are_left_to_others(void) {
  prepare();
  deadline_configure(0);
  SUCCEEDS(start("irecv", id, 5));
  run_number = base + 2;
  SUCCEEDS(start("irecv", other, 6));
  run_number = base + 1;
  fake->deliver(here()->handle, 2, 7, message, 4);
  FAILS(receive(2, 7), FFI_INVALID_ARGUMENT, "too short");
  CHECK_EQUAL(queue_posted(), 1); /* of the other program */
  deliver(2, 5);
  SUCCEEDS(receive(2, 5));
  CHECK(has_come());
  deliver(2, 6);
  SUCCEEDS(wait_on(other, true));
  FAILS(wait_on(id, true), FFI_FAILED_PRECONDITION, "waited for already");
  all_is_done();
}

static ffi_error *do_send(void) { return RUN("send", ARRAY(F32, in, N), NONE, COMM(here()), 2, 5); }

static ffi_error *do_reduce(void) {
  return RUN("allreduce", ARRAY(F32, in, N), ARRAY(F32, out, N), COMM(here()), reduction("SUM"));
}

/* A program that is repeated would communicate again. */
static void what_is_done_is_told(void) {
  prepare();
  static const char said[] = "This function has communicated before, and would do that again";
  for (int how = 0; how < 3; how++) {
    run_number = base + 11 + how;
    if (how == 0) SUCCEEDS(receive(fake->proc_null, 5));
    if (how == 1) SUCCEEDS(do_reduce());
    if (how == 2) SUCCEEDS(do_send());
    ffi_error *error = receive(2, 5);
    CHECK(error != NULL && (strstr(error->text, said) != NULL) == (how > 0));
    error_free(error);
  }
}

/* Its own message stays in memory of the library until it has left, which is looked at now and then. */
static void sendrecv_leaves_its_message(void) {
  prepare();
  fake->slow = 1000;
  FAILS(exchange(2, 5), FFI_DEADLINE_EXCEEDED, "jaxmpi.sendrecv on rank 1 of 4: no message from rank 2 with tag 5",
        "What it sends to rank 2 with tag 5 is under way", "send nothing again");
  CHECK_EQUAL(fake->live_requests, 1);
  CHECK_EQUAL(requests_in_flight(), 1);
  const struct fake_call *sent = called("MPI_Isend", 0);
  CHECK(sent->in != (const void *)in);
  CHECK_SAME(sent->in, in, sizeof in);
  fake->slow = 0;
  deliver(2, 5);
  SUCCEEDS(receive(2, 5));
  CHECK(has_come());
  run_number = base + 2;
  FAILS(exchange(2, 5), FFI_DEADLINE_EXCEEDED, "send nothing again"); /* this one leaves at once */
  for (int i = 0; i < 10000 && requests_in_flight() > 0; i++) usleep(1000);
  all_is_done();
  CHECK(requests_finish() == 0);
}

static void errors_of_sendrecv_leave_nothing(void) {
  static const char *const functions[] = {"MPI_Isend", "MPI_Improbe", "MPI_Mrecv", "MPI_Wait"};
  FOR_EACH (const char *const *, function, functions) {
    int64_t before = requests_in_flight();
    prepare();
    context("%s", *function);
    deadline_configure(60);
    deliver(2, 5);
    fake->fail(*function, 1, 77);
    FAILS(exchange(2, 5), FFI_INTERNAL, *function, "the fake's text for 77");
    CHECK_EQUAL(requests_in_flight(), before);
    fake->reset();
  }
}

/* --- what is refused: it takes longer, is reported with the reason, and is done --- */

static char text[8192]; /* what the watch has said */

static const char GOES_ON[] = "It goes on, though JAXMPI_TIMEOUT_ACTION is raise: ";

/* Lets MPI go on once the watch has told of the call, however late that is on a busy machine. */
static void *release(void *caught) {
  char told[sizeof text] = "";
  for (double begin = now(); strstr(told, GOES_ON) == NULL && now() - begin < 20; usleep(1000)) {
    ssize_t bytes = pread(fileno(caught), told, sizeof told - 1, 0);
    told[bytes < 0 ? 0 : bytes] = '\0';
  }
  fake->linger_ms = 0;
  fake->held = false;
  return NULL;
}

/* MPI is held up by `held` or `linger_ms`. */
static void check_refused(ffi_error *(*call)(void), const char *why) {
  int usual = dup(STDERR_FILENO);
  FILE *caught = tmpfile();
  pthread_t releasing;
  if (caught == NULL || usual < 0 || dup2(fileno(caught), STDERR_FILENO) < 0) abort();
  watchdog_configure(LIMIT, ACTION_RAISE, NULL);
  if (pthread_create(&releasing, NULL, release, caught) != 0) abort();
  ffi_error *error = call();
  pthread_join(releasing, NULL);
  usleep(100000); /* for the watch to see that it is done */
  watchdog_stop();
  dup2(usual, STDERR_FILENO);
  close(usual);
  rewind(caught);
  text[fread(text, 1, sizeof text - 1, caught)] = '\0';
  fclose(caught);
  context("'%s' was said", text);
  SUCCEEDS(error);
  CHECK(strstr(text, GOES_ON) != NULL && strstr(text, why) != NULL);
  derivative = leaf = 0;
}

static int tag_of_message;
static ffi_error *do_receive(void) { return receive(2, tag_of_message); }
static ffi_error *do_exchange(void) { return exchange(2, tag_of_message); }
static ffi_error *do_wait(void) { return wait_on(id, true); }
static ffi_error *do_wait_for_message(void) { return wait_on(id, false); }

static void calls_are_refused(void) {
  static const struct {
    const char *why;
    ffi_error *(*call)(void);
    int tag;
    int64_t leaf, run;
  } refused[] = {
      {"it belongs to a derivative", do_receive, OF_DERIVATIVES, LEAF_ALONE, 1},
      {"it belongs to a derivative", do_exchange, OF_DERIVATIVES, LEAF_ALONE, 1},
      {"other arrays of its pytree have been received already", do_receive, 5, LEAF_MIDDLE, 1},
      {"other arrays of its pytree have been received already", do_exchange, 5, LEAF_LAST, 1},
      {"the other arrays of its pytree would not be sent any more", do_exchange, 5, LEAF_FIRST, 1},
      {"XLA does not tell to which run of a function it belongs", do_receive, 5, LEAF_ALONE, 0},
      {"MPI cannot take back a message that it has begun to send", do_send, 5, LEAF_ALONE, 1},
      {"MPI cannot take back what all ranks take part in", do_reduce, 5, LEAF_ALONE, 1},
  };
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    prepare();
    tag_of_message = refused[i].tag, leaf = refused[i].leaf, run_number = refused[i].run == 0 ? 0 : base + 1;
    if (refused[i].call == do_receive || refused[i].call == do_exchange) deliver(2, tag_of_message);
    fake->linger_ms = 30000;
    check_refused(refused[i].call, refused[i].why);
    if (refused[i].call == do_receive || refused[i].call == do_exchange) CHECK(has_come());
    all_is_done();
  }
}

/* `kind`: of what is started; its wait is refused until it is done. */
static void check_wait(const char *kind, int64_t of, ffi_error *(*wait)(void), const char *why) {
  prepare();
  derivative = of;
  SUCCEEDS(start(kind, id, of ? OF_DERIVATIVES : 5));
  fake->held = true;
  if (strcmp(kind, "irecv") == 0) deliver(2, of ? OF_DERIVATIVES : 5);
  check_refused(wait, why);
  all_is_done();
}

static void waits_are_refused(void) {
  check_wait("isend", 0, do_wait_for_message, "it was started in the same compiled function");
  check_wait("iallreduce", 0, do_wait, "it was started in the same compiled function");
  check_wait("irecv", DERIVATIVE_COTANGENT, do_wait, "it belongs to a derivative");
}

/* The program that would be repeated would take the next message for one that has been received. */
static void what_would_be_lost_is_refused(void) {
  static const char why[] = "the same compiled function has received other messages, which would be lost";
  for (int how = 0; how < 5; how++) {
    prepare();
    context("%d", how);
    run_number = base + 20 + how;
    if (how < 2) SUCCEEDS(start("irecv", other, how == 0 ? 5 : 6));
    SUCCEEDS(start("irecv", id, 5));
    if (how < 2) deliver(2, how == 0 ? 5 : 6);
    queue_match(NULL, NULL, 0);
    if (how == 2 || how == 3) deliver(3, 7);
    if (how == 2) SUCCEEDS(receive(3, 7));
    if (how == 3) SUCCEEDS(exchange(3, 7));
    if (how == 4) SUCCEEDS(start("iallreduce", other, 0));
    if (how == 4) SUCCEEDS(wait_on(other, true));
    fake->held = true;
    deliver(2, 5);
    check_refused(do_wait, why);
    CHECK(has_come());
    if (how < 2) SUCCEEDS(wait_on(other, true));
    all_is_done();
  }
}

static void of_another_run_nothing_is_lost(void) {
  prepare();
  run_number = base + 30;
  deliver(3, 7);
  SUCCEEDS(receive(3, 7));
  run_number = base + 31;
  FAILS(receive(2, 5), FFI_DEADLINE_EXCEEDED, "no message");
  run_number = base + 30 + (1 << 16); /* has the place of the first one */
  FAILS(receive(2, 5), FFI_DEADLINE_EXCEEDED, "no message");
  run_number = -(base + 30);
  FAILS(receive(2, 5), FFI_DEADLINE_EXCEEDED, "no message");
}

static const struct test tests[] = {
    TEST(a_message_that_comes_later_is_received),
    TEST(a_message_in_time_is_received),
    TEST(the_line_is_told),
    TEST(a_wait_can_be_repeated),
    TEST(the_order_of_receives_stays),
    TEST(requests_that_are_done_are_kept),
    TEST(of_one_program_messages_are_left_to_others),
    TEST(after_any_error_messages_are_left_to_others),
    TEST(what_is_done_is_told),
    TEST(errors_of_sendrecv_leave_nothing),
    TEST(calls_are_refused),
    TEST(waits_are_refused),
    TEST(what_would_be_lost_is_refused),
    TEST(of_another_run_nothing_is_lost),
    TEST(sendrecv_leaves_its_message), /* the last: it ends what looks after requests */
};

MAIN(tests)
