/* Requests: operations that have been started and not been waited for yet.
 *
 * What is in flight is in memory of the library, since XLA may reuse its own as soon as the operation that starts has
 * returned. A program knows a request by two numbers, its place and its generation, each exact as a float32: so that
 * what differentiates can treat them as an array with a tangent, which is another request.
 *
 * A receive is not given to MPI before its message has come and its size is known (MPI_Improbe): a receive into a
 * buffer that is too small is an error by the standard, after which a library may have written past its end. So the
 * order of receives is kept here: whoever finds a message gives it to the first receive that it fits.
 *
 * Who lets the library progress: the thread in a wait; else a thread of ours, which looks for messages that are
 * expected: often while something long is in flight and for a time after a blocking operation has begun, now and then
 * else, since a sender may wait for any of them, or this rank elsewhere for that sender. Nothing expected and nothing
 * long, it is asleep. It needs MPI_THREAD_MULTIPLE.
 *
 * Threads: any thread may call these functions. `requests_lock` is the lock of all that is declared here, of members
 * of a receive too; it may be taken while runtime.lock is held, not the other way round.
 */
#ifndef JAXMPI_REQUESTS_H
#define JAXMPI_REQUESTS_H

#include "core/words.h"

/* Bytes from which on what is in flight is looked after often: shorter messages mostly leave at once. */
enum { LONG_BYTES = 1 << 15 };

/* Nanoseconds after which the thread looks for what is expected and short. Tests change it. */
extern long requests_patience;

/* A message that is to come. */
struct receive {
  struct receive *next; /* in the order of their starts, while it is expected */
  struct communicator *comm;
  int source, tag;
  enum { IDLE, EXPECTED, MATCHED, UNDER_WAY } state;
  bool waited_for;         /* its thread receives it, once it is matched */
  bool alone;              /* taken out of the list, for nothing else was expected as the wait for it began */
  int64_t bytes;           /* a message of another size is left to the thread that waits for it */
  char *memory;            /* where it is received; NULL: memory is taken when it has come, */
  struct request *request; /* for this one, which may be NULL */
  int code;                /* of MPI, */
  const char *function;    /* by this function */
  intptr_t message, handle;
  _Alignas(16) char status[48]; /* an MPI_Status */
};

struct block; /* of memory */

struct request {
  int place;
  uint32_t generation;
  int64_t serial;      /* in the order of all starts */
  bool is_long, usual; /* `usual`: of the size of nearly all */
  bool held, was_long; /* a thread waits for it, and may give it back; it was long before that */
  bool in_vain;        /* an error has ended its wait, or come before that */
  bool left;           /* a message of a sendrecv that has ended so: nobody waits for it any more */
  int64_t run;         /* of the program that has begun it: ffi_run */
  const struct operation *operation;
  struct communicator *comm;
  int64_t attributes[MAX_ATTRIBUTES], words[WORDS];
  const struct datatype *type; /* of the result, */
  int64_t count;               /* and its elements */
  int64_t batch;               /* the arrays of a batch that it is of, 1 without one */
  uint64_t label;              /* of a plan's messages */
  struct block *block;
  char *data;           /* in flight; NULL: nothing. In the block, or in `small`, if it fits there */
  char *result;         /* in `data`; NULL: there is none, or it is a message */
  int code;             /* the first error of MPI since it was begun, */
  const char *function; /* of this function */
  int handle_count, receive_count;
  intptr_t *handles; /* MPI_Request */
  struct receive *receives;
  _Alignas(64) char small[64];
};

extern pthread_mutex_t requests_lock;

/* Makes a request of a call that starts something, with room for `bytes` in flight, handles and receives; its numbers
 * will be in `id`. NULL, or the error. */
ffi_error *request_new(const struct call *call, const struct buffer *id, size_t bytes, int handles, int receives,
                       struct request **request);

/* Writes its numbers, from now on it can be waited for and its receives are expected. `moved`: bytes under way. */
void request_begin(struct request *request, const struct buffer *id, int64_t moved);

/* Takes a request that a call waits for: nobody else can, from now on. NULL with `error` NULL: the numbers are zeros,
 * which `zero` allows, an attribute of the call: see ops.def. */
struct request *request_take(const struct call *call, const struct buffer *id, int64_t zero, ffi_error **error);

/* Which it is of all of this process, for the timeline; 0: it has not begun. */
static inline int64_t request_number(const struct request *request) {
  return request->place < 0 ? 0 : ((int64_t)request->generation << 24) + request->place;
}

/* The same for a wait that may end before it is done: it is in flight all the while, but nobody else can take it. NULL:
 * there is none. `in_vain`: its wait is over, and it is as it was. */
struct request *request_hold(const struct buffer *id);
void request_release(struct request *request, bool in_vain);

/* An error will end a run, after which nobody can wait for what it has begun: its requests to receive expect nothing
 * any more. False: one has got its message, and nothing has changed. Under the lock. */
bool requests_give_up(int64_t run);

/* The error has ended it: those requests are ended, too. A message that has come is lost. */
void requests_abandon(int64_t run);

/* A message that nobody waits for is under way: the thread ends the request once it has left. */
void request_leave(struct request *request, int64_t bytes);

/* In reverse mode the order of the waits, from the last to the first, is the order in which adjoints are started, by
 * which they are matched among those that MPI cannot tell apart. So that all ranks have one order, it must be that of
 * the starts: the error if one of its like was started earlier, and is not waited for yet; */
ffi_error *request_check_order(const struct call *call, const struct request *request);

/* or if there is one like an adjoint that blocks, which starts `row` in the words of one that does not. */
ffi_error *request_check_blocking(const struct call *call, int row, int64_t peer, int64_t tag);

/* Gives back its memory and its place. */
void request_end(struct request *request);

/* Memory of the request for `bytes`, which has none yet, at `data`. False: out of memory. Under the lock. */
bool request_room(struct request *request, size_t bytes, char **data);

/* Receives in the order of their starts: adds, removes. Under the lock. */
extern struct receive *receives_first;
extern atomic_int receives_expected; /* of all communicators; each has its own number of them, too */
void receive_expect(struct receive *receive);
void receive_forget(struct receive *receive);

/* Messages that were found where one with any tag was looked for, before the receive that they are for has begun. They
 * count as expected on their communicator, so that receives look among them first. Under the lock. */
extern struct receive *kept_first;
void receive_keep(struct receive *kept);
void receive_unkeep(struct receive *kept);

static inline bool waits_for_request(int row) { return row == ROW_wait || row == ROW_exchange_finish; }

/* A blocking operation begins: messages that are expected must not wait for its end. */
void requests_wake(void);
static inline void requests_before(const struct call *call) {
  bool expected = atomic_load_explicit(&receives_expected, memory_order_relaxed) > 0;
  if (expected && (call->compared || !has_request(call->operation))) requests_wake();
}

/* The communicator is freed, or MPI finalized if it is COMM_SELF: its messages are no longer expected. */
void requests_forget(const struct communicator *comm);

/* Ends the thread, and names on stderr what was never waited for; once. Reductions by functions of the user's are then
 * completed, for which all ranks have 5 seconds: MPI may call such a function as long as they are under way, and once
 * Python has ended mpi4py ends the job instead. Returns how many are still under way. */
int64_t requests_finish(void);

/* How many requests have not been waited for. */
int64_t requests_in_flight(void);

#endif
