/* Lets the MPI library progress while no thread waits in MPI: a background thread polls for the messages of posted
 * receives. It polls often while a long transfer is in flight or just after a blocking call started, and rarely
 * otherwise. It must always poll: a sender may be blocked until we match its message. The thread sleeps while no
 * receive is posted and no long transfer is in flight. It needs MPI_THREAD_MULTIPLE.
 *
 * Threads: any. A lock protects the state of the thread. Nothing is called and no other lock is taken under it. */
#ifndef JAXMPI_PROGRESS_H
#define JAXMPI_PROGRESS_H

#include "requests/queue.h"

/* The thread calls this function in each poll, besides the queue. All callers pass the same function. */
typedef void progress_work(void);

/* A receive has been posted: starts the thread if it does not run yet. */
void progress_posted(progress_work *work);

/* Count `more` further long requests in flight; fewer if negative. */
void progress_long(int more, progress_work *work);

/* A blocking operation begins: posted receives must not wait until it ends. */
void progress_hurry(void);
static inline void progress_before(const struct call *call) {
  if (queue_posted() > 0 && (call->comparison.due || !has_request(call->operation))) progress_hurry();
}

/* The thread does not poll again from now on. */
void progress_end(void);

/* Wait until the thread has ended. */
void progress_join(void);

/* Nanoseconds after which the thread polls for posted receives while no transfer is long. Tests change it. */
extern atomic_long progress_patience;

#endif
