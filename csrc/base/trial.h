/* Trials: which of two ways to do something is faster, measured now and then by doing it each way.
 *
 * Of PERIOD times the first are tries: TRIES by way 0, then TRIES by way 1. All other times use the way with the
 * shorter least time. The first try of a way is not timed, because it meets the state that the other way has left.
 *
 * Threads: any; threads that use one trial at the same time may disturb each other's choice.
 */
#ifndef JAXMPI_TRIAL_H
#define JAXMPI_TRIAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct trial {
  _Atomic uint32_t times;    /* it was done */
  _Atomic uint32_t least[2]; /* nanoseconds of each way */
};

enum { TRIES = 4, PERIOD = 1024 };

/* Return the number of this time in the period, for the other functions. */
static inline uint32_t trial_begin(struct trial *trial) {
  uint32_t times = atomic_load_explicit(&trial->times, memory_order_relaxed);
  atomic_store_explicit(&trial->times, times + 1, memory_order_relaxed);
  return times % PERIOD;
}

static inline bool trial_is_timed(uint32_t number) { return number < 2 * TRIES && number % TRIES != 0; }

/* Return the way to use this time: 0 or 1. */
static inline int trial_way(const struct trial *trial, uint32_t number) {
  if (number < 2 * TRIES) return number >= TRIES;
  return atomic_load_explicit(&trial->least[1], memory_order_relaxed) <
         atomic_load_explicit(&trial->least[0], memory_order_relaxed);
}

/* Record the time that it took. Only if it was timed. */
static inline void trial_end(struct trial *trial, uint32_t number, double seconds) {
  _Atomic uint32_t *least = &trial->least[number >= TRIES];
  uint32_t time = seconds < 1 ? (uint32_t)(seconds * 1e9) : UINT32_MAX;
  if (number % TRIES == 1 || time < atomic_load_explicit(least, memory_order_relaxed))
    atomic_store_explicit(least, time, memory_order_relaxed);
}

#endif
