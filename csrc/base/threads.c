#include "base/threads.h"

#include <signal.h>
#include <stdlib.h>

int thread_start(pthread_t *thread, void *(*work)(void *unused)) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(thread, NULL, work, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

static void give_back(void *lane) { atomic_store_explicit(&((struct lane *)lane)->taken, false, memory_order_release); }

bool lanes_begin(struct lanes *lanes, size_t bytes) {
  lanes->bytes = bytes;
  return pthread_key_create(&lanes->at_exit, give_back) == 0;
}

void *lanes_take(struct lanes *lanes) {
  struct lane *lane = atomic_load(&lanes->all);
  bool no = false;
  while (lane != NULL && !atomic_compare_exchange_strong(&lane->taken, &no, true)) lane = lane->next, no = false;
  if (lane == NULL) {
    if ((lane = calloc(1, lanes->bytes)) == NULL) return NULL;
    atomic_init(&lane->taken, true);
    lane->number = 1 + atomic_fetch_add(&lanes->count, 1);
    lane->next = atomic_load(&lanes->all);
    while (!atomic_compare_exchange_weak(&lanes->all, &lane->next, lane)) continue;
  }
  pthread_setspecific(lanes->at_exit, lane);
  return lane;
}
