/* Who lets the MPI library progress: the thread in a wait; else a thread of ours, which looks for messages that are
 * posted. It looks often while something long is in flight and for a time after a blocking operation has begun, and now
 * and then else, since a sender may wait for any of them, or this rank elsewhere for that sender. While nothing is
 * posted and nothing is long it is asleep. It needs MPI_THREAD_MULTIPLE.
 *
 * Threads: any. The thread's state has a lock of its own, under which nothing else is called or taken. */
#ifndef JAXMPI_PROGRESS_H
#define JAXMPI_PROGRESS_H

#include "requests/queue.h"

/* What the thread calls as it looks, besides the queue: all pass one function. */
typedef void progress_work(void);

/* A receive has been posted: the thread begins, if it does not run yet. */
void progress_posted(progress_work *work);

/* So many more long requests are in flight, or fewer. */
void progress_long(int more, progress_work *work);

/* A blocking operation begins: messages that are posted must not wait for its end. */
void progress_hurry(void);
static inline void progress_before(const struct call *call) {
  if (queue_posted() > 0 && (call->comparison.due || !has_request(call->operation))) progress_hurry();
}

/* From now on the thread does not look again. */
void progress_end(void);

/* Waits until it has ended. */
void progress_join(void);

/* Nanoseconds after which the thread looks for what is posted and short. Tests change it. */
extern atomic_long progress_patience;

#endif
