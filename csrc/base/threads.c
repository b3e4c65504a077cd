#include "base/threads.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

int thread_start(pthread_t *thread, void *(*work)(void *unused)) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(thread, NULL, work, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

void thread_pauses_exactly(void) {
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* nanoseconds */
#endif
}

enum { SECOND = 1000000000 };

#ifdef __APPLE__ /* without conditions of another clock */
void thread_condition(pthread_cond_t *condition) { (void)condition; }

bool thread_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t nanoseconds) {
  struct timespec time = {(time_t)(nanoseconds / SECOND), (long)(nanoseconds % SECOND)};
  return pthread_cond_timedwait_relative_np(condition, lock, &time) != 0;
}
#else
void thread_condition(pthread_cond_t *condition) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_destroy(condition);
  pthread_cond_init(condition, &attributes);
  pthread_condattr_destroy(&attributes);
}

bool thread_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t nanoseconds) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  nanoseconds += until.tv_nsec;
  until.tv_sec += (time_t)(nanoseconds / SECOND);
  until.tv_nsec = (long)(nanoseconds % SECOND);
  return pthread_cond_timedwait(condition, lock, &until) != 0;
}
#endif

static void give_record_back(void *record) {
  atomic_store_explicit(&((struct thread_record *)record)->taken, false, memory_order_release);
}

bool thread_records_begin(struct thread_records *records, size_t bytes) {
  records->bytes = bytes;
  return pthread_key_create(&records->at_exit, give_record_back) == 0;
}

void *thread_record_take(struct thread_records *records) {
  struct thread_record *record = atomic_load(&records->all);
  bool no = false;
  while (record != NULL && !atomic_compare_exchange_strong(&record->taken, &no, true))
    record = record->next, no = false;
  if (record == NULL) {
    if ((record = calloc(1, records->bytes)) == NULL) return NULL;
    atomic_init(&record->taken, true);
    record->number = 1 + atomic_fetch_add(&records->count, 1);
    record->next = atomic_load(&records->all);
    while (!atomic_compare_exchange_weak(&records->all, &record->next, record)) continue;
  }
  pthread_setspecific(records->at_exit, record);
  return record;
}
