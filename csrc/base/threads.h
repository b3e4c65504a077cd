/* Threads: how those of ours begin and wait, and records of all. Each thread that asks has one of its own until it
 * ends; then another thread gets it. Records are never freed, so a thread of ours may go through all of them without a
 * lock.
 *
 * Threads: thread_records_begin is called before thread_record_take. Any thread may call the rest.
 */
#ifndef JAXMPI_THREADS_H
#define JAXMPI_THREADS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The first member of a thread record. */
struct thread_record {
  atomic_bool taken;
  int number; /* from 1, in the order in which they were made */
  struct thread_record *next;
};

struct thread_records {
  struct thread_record *_Atomic all; /* the last to be made comes first */
  atomic_int count;
  size_t bytes; /* of a record */
  pthread_key_t at_exit;
};

/* Starts a thread of ours, without signals, which are for the program's threads. An error number; 0. */
int thread_start(pthread_t *thread, void *(*work)(void *unused));

/* From now on short pauses of this thread are not longer than it asks for, where the system has a way to say so. */
void thread_pauses_exactly(void);

/* Makes a condition, of which PTHREAD_COND_INITIALIZER has made another one, for `thread_wait`. Nobody waits for it. */
void thread_condition(pthread_cond_t *condition);

/* Waits until the condition is signalled, or for so long, whatever happens to the time of day. Whether the time is
 * over. The calling thread has the lock. */
bool thread_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t nanoseconds);

bool thread_records_begin(struct thread_records *records, size_t bytes);

/* The calling thread's record, to be kept by it: zeros, or as the thread before left it; NULL: no memory. */
void *thread_record_take(struct thread_records *records);

#endif
