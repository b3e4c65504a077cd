#include "requests/progress.h"

#include <time.h>

#include "base/threads.h"

enum { PAUSE_NANOSECONDS = 200000, PAUSES = 50 /* after a blocking operation has begun */ };

atomic_long progress_patience = 2000000;

/* The lock protects all of it. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t wake;
  pthread_t thread;
  progress_work *work;
  int64_t long_ones;
  bool running, asleep, ending;
  bool calm;  /* nothing has been posted since the thread last polled */
  int pauses; /* how many short pauses are left before the thread polls rarely again */
} state = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static void *run_progress(void *unused);

static void begin_thread(progress_work *work) {
  if (state.running || state.ending || runtime.serialize) return;
  state.work = work;
  thread_condition(&state.wake);
  state.running = thread_start(&state.thread, run_progress) == 0;
}

void progress_posted(progress_work *work) {
  pthread_mutex_lock(&state.lock);
  begin_thread(work);
  state.calm = false;
  if (state.asleep) pthread_cond_signal(&state.wake);
  state.asleep = false;
  pthread_mutex_unlock(&state.lock);
}

void progress_long(int more, progress_work *work) {
  if (more == 0) return;
  pthread_mutex_lock(&state.lock);
  state.long_ones += more;
  if (more > 0) {
    begin_thread(work);
    pthread_cond_signal(&state.wake);
  }
  pthread_mutex_unlock(&state.lock);
}

void progress_hurry(void) {
  pthread_mutex_lock(&state.lock);
  if (state.pauses == 0) pthread_cond_signal(&state.wake);
  state.pauses = PAUSES;
  pthread_mutex_unlock(&state.lock);
}

/* Wait for `progress_patience`, or until something is posted or long, if nothing has been for so long. Return whether
 * to poll for posted receives now. */
static bool rest_a_while(void) {
  if (state.calm) {
    state.asleep = true;
    pthread_cond_wait(&state.wake, &state.lock);
    state.asleep = false;
    return false;
  }
  state.calm = queue_posted() == 0;
  return thread_wait(&state.wake, &state.lock, atomic_load(&progress_patience));
}

/* Poll without the lock. `often`: poll the long requests, too, and then pause. */
static void poll_once(bool often) {
  pthread_mutex_unlock(&state.lock);
  queue_match();
  if (often) {
    state.work();
    nanosleep(&(struct timespec){0, PAUSE_NANOSECONDS}, NULL);
  }
  pthread_mutex_lock(&state.lock);
}

static void *run_progress(void *unused) {
  thread_pauses_exactly();
  pthread_mutex_lock(&state.lock);
  while (!state.ending) {
    if (queue_posted() == 0) state.pauses = 0;
    bool often = state.long_ones > 0 || state.pauses > 0;
    if (state.pauses > 0) state.pauses--;
    if ((often || rest_a_while()) && !state.ending) poll_once(often);
  }
  pthread_mutex_unlock(&state.lock);
  return unused;
}

void progress_end(void) {
  pthread_mutex_lock(&state.lock);
  state.ending = true;
  pthread_cond_signal(&state.wake);
  pthread_mutex_unlock(&state.lock);
}

void progress_join(void) {
  pthread_mutex_lock(&state.lock);
  bool running = state.running;
  state.running = false;
  pthread_mutex_unlock(&state.lock);
  if (running) pthread_join(state.thread, NULL);
}
