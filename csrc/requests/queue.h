/* The two queues of MPI's matching, kept here: the posted receives and the unexpected messages.
 *
 * A receive is not given to MPI before its message has come and its size is known (MPI_Improbe): a receive into a
 * buffer that is too small is an error by the standard, after which a library may have written past its end. So the
 * order of receives is kept here: whoever finds a message delivers it to the first posted receive that it fits.
 *
 * An unexpected message was found where one with any tag was looked for, before the receive that it is for has begun.
 *
 * Threads: any. The queues have a lock of their own, which each function takes, and under which MPI is called by
 * `probe`, `match` and `receive` of struct abi. It may be taken while runtime.lock or the lock of the requests is held,
 * not the other way round. The members of a receive that are set as its message is matched belong to the queue while it
 * is posted, and then to the thread that waits for it. */
#ifndef JAXMPI_QUEUE_H
#define JAXMPI_QUEUE_H

#include "core/abi.h"
#include "core/plan.h"

/* A message that MPI has matched; by a mere probe without `handle`. */
struct message_info {
  int source, tag;
  intptr_t handle;              /* MPI_Message */
  _Alignas(16) char status[48]; /* MPI_Status */
};

enum receive_state { RECEIVE_IDLE, RECEIVE_POSTED, RECEIVE_MATCHED, RECEIVE_UNDER_WAY };

struct receive {
  struct receive *next; /* in the queue, in the order of their starts */
  struct communicator *comm;
  int source, tag;
  enum receive_state state;
  bool waited_for;         /* a thread waits for it, and receives the message once it is matched */
  bool exclusive;          /* taken out of the queue, for nothing else was posted as the wait for it began */
  int64_t bytes;           /* a message of another size is left to the thread that waits for it */
  char *memory;            /* for the message; NULL: memory of the request is taken when it has come */
  struct request *request; /* that it belongs to; NULL: a call waits for it */
  /* Once it is matched: */
  int code;             /* of MPI, and */
  const char *function; /* the function that has returned it */
  struct message_info info;
  intptr_t handle; /* MPI_Request, if it is under way */
};

/* Whether a receive may have a message with this tag. With any tag those of plans never are for it; irecv, which may be
 * matched much later than it is started, leaves those of derivatives alone, too (_mpi/tags.py). The derivative of
 * sendrecv receives with any tag. */
static inline bool receive_accepts(const struct receive *receive, int tag) {
  if (receive->tag != runtime.abi->any_tag) return receive->tag == tag;
  return receive->request != NULL ? tag < notices_tag() : !is_of_plans(tag);
}

/* The posted receives of all communicators. Each communicator counts its own, with its unexpected messages: `queued`.
 */
extern atomic_int queue_posted_count;
static inline int queue_posted(void) { return atomic_load_explicit(&queue_posted_count, memory_order_relaxed); }

/* Posts a receive. */
void queue_post(struct receive *receive);

/* Takes a receive out of the queue, unless its message has been matched: then false. One that is not posted stays as it
 * is. */
bool queue_withdraw(struct receive *receive);

/* Takes a receive out if nothing else is posted, so that the thread which waits for it may leave the matching to MPI.
 */
bool queue_withdraw_alone(struct receive *receive);

/* Matches the messages that have come for posted receives, on one communicator or, with NULL, on all. Whether any of
 * these receives is still posted. Does not wait. */
bool queue_match(const struct communicator *comm, const struct receive receives[], int count);

/* A thread waits for a receive from now on: it receives the message itself, unless that is under way already. */
void queue_await(struct receive *receive);

/* Whether any of these receives is posted. */
bool queue_has(const struct receive receives[], int count);

/* Keeps an unexpected message. False: no memory. */
bool queue_add_unexpected(struct communicator *comm, const struct message_info *info);

/* Drops all receives and messages of a communicator that has been freed; of all, if that is COMM_SELF. */
void queue_forget(const struct communicator *comm);

#endif
