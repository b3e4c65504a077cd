/* Threads: how our threads begin and wait, and records of all threads. Each thread that asks has one record until
 * it ends; then another thread gets the record. Records are never freed, so a thread of ours may go through all of them
 * without a lock.
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

/* Start a thread of ours, without signals, which are for the program's threads. Return 0 or an error number. */
int thread_start(pthread_t *thread, void *(*work)(void *unused));

/* Make short pauses of this thread no longer than it asks for, from now on, where the system can do this. */
void thread_pauses_exactly(void);

/* Prepare a condition, initialized by PTHREAD_COND_INITIALIZER, for `thread_wait`. No thread waits for it yet. */
void thread_condition(pthread_cond_t *condition);

/* Wait until the condition is signalled, or until the time is over, whatever happens to the time of day. Return
 * whether the time is over. The calling thread has the lock. */
bool thread_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t nanoseconds);

bool thread_records_begin(struct thread_records *records, size_t bytes);

/* Return the calling thread's record, which it keeps: zeros, or as the thread before left it; NULL: no memory. */
void *thread_record_take(struct thread_records *records);

#endif
