/* Requests: operations that have been started and not been waited for yet.
 *
 * What is in flight is in memory of the library, since XLA may reuse its own as soon as the operation that starts has
 * returned. A program knows a request by two numbers, its place in the table and its generation, each exact as a
 * float32: so that what differentiates can treat them as an array with a tangent, which is another request.
 *
 * Threads: any. The table has a lock of its own, which each function takes; it may be taken while runtime.lock is held,
 * not the other way round, and the locks of the queue, of the thread and of the memory are taken under it.
 */
#ifndef JAXMPI_TABLE_H
#define JAXMPI_TABLE_H

#include "observe/summary.h"
#include "requests/queue.h"

/* Bytes from which on what is in flight is looked after often: shorter messages mostly leave at once. */
enum { LONG_BYTES = 1 << 15 };

struct block; /* of memory */

struct request {
  int place;           /* in the table */
  uint32_t generation; /* of the requests at this place */
  int64_t serial;      /* number in the order of all starts */
  bool is_long;        /* the thread looks after it */
  bool usual;          /* it has one handle and one receive at most, as nearly all have */
  int64_t run;         /* the execution of a program that has begun it: ffi_run */
  const struct operation *operation;
  struct communicator *comm;
  int64_t attributes[MAX_ATTRIBUTES], summary[SUMMARY_WORDS];
  const struct datatype *type; /* of the result */
  int64_t count;               /* elements of the result */
  int64_t batch;               /* arrays of the batch that it belongs to, 1 without one */
  uint64_t label;              /* of a plan's messages */
  struct block *block;         /* of memory, if `small` is not enough */
  char *data;                  /* what is in flight, in `block` or `small`; NULL: nothing */
  char *result;                /* in `data`; NULL: there is none, or it is a message */
  int code;                    /* the first error of MPI since it was begun */
  const char *function;        /* the function that has returned `code` */
  int handle_count, receive_count;
  intptr_t *handles; /* MPI_Request */
  struct receive *receives;
  _Alignas(64) char small[64];
};

/* Makes a request of a call that starts something, with room for `bytes` in flight, handles and receives; its numbers
 * will be in `id`. NULL, or the error. */
ffi_error *request_new(const struct call *call, const struct buffer *id, size_t bytes, int handles, int receives,
                       struct request **request);

/* Writes its numbers; from now on it can be waited for, and its receives are posted. `moved`: bytes under way. */
void request_begin(struct request *request, const struct buffer *id, int64_t moved);

/* Takes a request that a call waits for: nobody else can, from now on. NULL with `error` NULL: the numbers are zeros,
 * which `zero` allows, an attribute of the call: see ops.def. */
struct request *request_take(const struct call *call, const struct buffer *id, int64_t zero, ffi_error **error);

/* A number unique in this process, for the timeline; 0: it has not begun. */
static inline int64_t request_number(const struct request *request) {
  return request->place < 0 ? 0 : ((int64_t)request->generation << 24) + request->place;
}

/* An error has ended a run, after which nobody can wait for what it has begun: its receives whose messages have not
 * been matched are ended, so that they take no message that comes later. A message that has been matched is lost. */
void requests_abandon(int64_t run);

/* Adjoints that MPI cannot tell apart are matched in the order in which they are started: in reverse mode that of the
 * waits, from the last to the first. The error if a request that is like this one was started earlier, and has not been
 * waited for yet. */
ffi_error *request_check_order(const struct call *call, const struct request *request);

/* A blocking adjoint is matched among those that have been started, too. The error if one is in flight that `row`
 * starts, the operation which does not block, with this peer and tag. */
ffi_error *request_check_blocking(const struct call *call, int row, int64_t peer, int64_t tag);

/* From here on a call speaks for the request that it waits for: errors name the operation that was started, and show
 * none of the buffers of the wait. */
struct own_words {
  const struct operation *operation;
  short buffer_count;
};
static inline struct own_words call_speak_for(struct call *call, const struct request *request) {
  struct own_words own = {call->operation, call->buffer_count};
  call->timeline.request = request_number(request);
  call->operation = request->operation;
  call->buffer_count = 0;
  memcpy(call->attributes, request->attributes, sizeof call->attributes);
  return own;
}
static inline void call_speak_again(struct call *call, struct own_words own) {
  call->operation = own.operation, call->buffer_count = own.buffer_count;
}

/* Gives back its memory and its place. */
void request_end(struct request *request);

/* Memory of the request for `bytes`, which has none yet, at `data`. False: out of memory. Any thread that has the
 * request, or the queue for one of its receives; no lock of the table. */
bool request_room(struct request *request, size_t bytes, char **data);

/* Posts a receive, and lets the thread look for its message. */
void request_post(struct receive *receive);

/* The communicator is revoked, and given up: so are its requests, of which none is named at the end. Those that a
 * thread waits for end by themselves. Returns how many were in flight. */
int64_t requests_give_up_on(const struct communicator *comm);

/* The communicator is freed, or MPI finalized if it is COMM_SELF: its receives and messages are dropped. */
void requests_forget(const struct communicator *comm);

/* Ends the thread, and names on stderr what was never waited for; once. Reductions by functions of the user's are then
 * completed, for which all ranks have 5 seconds: MPI may call such a function as long as they are under way, and once
 * Python has ended mpi4py ends the job instead. Returns how many are still under way. */
int64_t requests_finish(void);

/* How many requests have not been waited for. */
int64_t requests_in_flight(void);

#endif
