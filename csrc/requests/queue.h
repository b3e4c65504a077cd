/* The two queues of MPI's matching, kept here: the posted receives and the unexpected messages.
 *
 * MPI gets a receive only when the message has come and the size is known (MPI_Improbe). By the standard, a receive
 * into a buffer that is too small is an error, and a library may then have written past the end of the buffer. So the
 * order of receives is kept here: the thread that matches a message delivers it to the first posted receive that it
 * fits.
 *
 * An unexpected message: a thread matched it for a receive with any tag that may not have it, and the receive that it
 * fits has not been posted yet.
 *
 * Threads: any. A lock protects the queues. Each function takes it, and calls MPI under it through `probe`, `match` and
 * `receive` of struct abi. It may be taken while runtime.lock or the lock of the requests is held, not the other way
 * round. The members of a receive that are set when the message is matched belong to the queue while the receive is
 * posted, and then to the thread that waits for it. */
#ifndef JAXMPI_QUEUE_H
#define JAXMPI_QUEUE_H

#include "core/abi.h"
#include "core/plan.h"

/* A message that MPI has matched. After a mere probe, `handle` is not set. */
struct message_info {
  int source, tag;
  intptr_t handle;              /* MPI_Message */
  _Alignas(16) char status[48]; /* MPI_Status */
};

enum receive_state { RECEIVE_IDLE, RECEIVE_POSTED, RECEIVE_MATCHED, RECEIVE_UNDER_WAY };

struct receive {
  struct receive *next; /* in the queue, in the order in which receives were posted */
  struct communicator *comm;
  int source, tag;
  enum receive_state state;
  bool waited_for;         /* a thread waits for it, and receives the message when it is matched */
  bool exclusive;          /* out of the queue, because nothing else was posted when the wait for it began */
  int64_t bytes;           /* a message of another size is left to the thread that waits for it */
  char *memory;            /* for the message; NULL: the request gets memory when the message has come */
  struct request *request; /* the request of this receive; NULL: a call waits for it */
  /* Once it is matched: */
  int code;             /* of MPI */
  const char *function; /* the MPI function that returned `code` */
  struct message_info info;
  intptr_t handle; /* MPI_Request, if it is under way */
};

/* Return whether a receive may have a message with this tag. A receive with any tag never gets the messages of plans.
 * irecv may be matched much later than it is started, so it does not get the messages of derivatives, either
 * (_mpi/tags.py). The derivative of sendrecv receives with any tag. */
static inline bool receive_accepts(const struct receive *receive, int tag) {
  if (receive->tag != runtime.abi->any_tag) return receive->tag == tag;
  return receive->request != NULL ? tag < notices_tag() : !is_of_plans(tag);
}

/* How many receives of all communicators are posted. In each communicator, `queued` counts the posted receives and the
 * unexpected messages. */
extern atomic_int queue_posted_count;
static inline int queue_posted(void) { return atomic_load_explicit(&queue_posted_count, memory_order_relaxed); }

/* Post a receive. */
void queue_post(struct receive *receive);

/* Take a receive out of the queue. False: the message has been matched. A receive that is not posted does not change.
 */
bool queue_withdraw(struct receive *receive);

/* Take a receive out if nothing else is posted. The thread that waits for it may then leave the matching to MPI. */
bool queue_withdraw_alone(struct receive *receive);

/* Match the messages that have come for posted receives. Does not wait. */
void queue_match(void);

/* A thread waits for a receive from now on. It receives the message itself, unless MPI already receives it. */
void queue_await(struct receive *receive);

/* Return whether a receive is posted. */
bool queue_has(const struct receive *receive);

/* Keep an unexpected message. False: no memory. */
bool queue_add_unexpected(struct communicator *comm, const struct message_info *info);

/* Drop all receives and messages of a communicator that has been freed. For COMM_SELF: of all communicators. */
void queue_forget(const struct communicator *comm);

#endif
