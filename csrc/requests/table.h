/* Requests: operations that have been started and not been waited for yet.
 *
 * The library keeps the data of a request in its own memory, because XLA may reuse a buffer as soon as the operation
 * that starts the request has returned. A program identifies a request by two numbers, the place in the table and the
 * generation. Both are exact as float32, so derivatives can treat a request as an array with a tangent, which is
 * another request.
 *
 * Threads: any. A lock protects the table, and each function takes it. It may be taken while runtime.lock is held, not
 * the other way round. The locks of the queue, of the thread and of the memory are taken under it.
 */
#ifndef JAXMPI_TABLE_H
#define JAXMPI_TABLE_H

#include "observe/summary.h"
#include "requests/queue.h"

/* A transfer of at least so many bytes is long, and polled often. Shorter messages mostly leave at once. */
enum { LONG_BYTES = 1 << 15 };

struct block; /* of memory */

struct request {
  int place;           /* in the table */
  uint32_t generation; /* counts the requests at this place */
  int64_t serial;      /* number in the order of all starts */
  bool is_long;        /* the background thread polls it often */
  bool usual;          /* at most one handle and one receive, as in nearly all requests */
  int64_t run;         /* the execution of the program that started it: ffi_run */
  const struct operation *operation;
  struct communicator *comm;
  int64_t attributes[MAX_ATTRIBUTES], summary[SUMMARY_WORDS];
  const struct datatype *type;     /* of the result */
  int64_t count;                   /* elements of the result */
  int64_t batch;                   /* arrays of the batch; 1 without one */
  uint64_t label;                  /* of a plan's messages */
  struct block *block;             /* of memory, if `small` is not enough */
  char *data;                      /* data to send or to receive, in `block` or `small`; NULL: none */
  char *result;                    /* in `data`; NULL: there is none, or it is a message */
  int code;                        /* the first error of MPI since the request began */
  const char *function;            /* the MPI function that returned `code` */
  int handle_count, receive_count; /* handles: of the operations that have been started so far */
  intptr_t *handles;               /* MPI_Request */
  struct receive *receives;
  _Alignas(64) char small[64];
};

/* Make a request for a call that starts an operation, with room for `bytes` of data, handles and receives. The id
 * will be in `id`. Return NULL, or the error. */
ffi_error *request_new(const struct call *call, const struct buffer *id, size_t bytes, int handles, int receives,
                       struct request **request);

/* Write the id. From now on the request can be waited for, and the receives are posted. `moved`: bytes under way. */
void request_begin(struct request *request, const struct buffer *id, int64_t moved);

/* Take the request that a call waits for: no other call can take it from now on. NULL with `error` NULL: the id is
 * zeros, and the call's attribute `zero` allows that: see ops.def. */
struct request *request_take(const struct call *call, const struct buffer *id, int64_t zero, ffi_error **error);

/* Return a number for the timeline, unique in this process, of a request that has begun. */
static inline int64_t request_number(const struct request *request) {
  return ((int64_t)request->generation << 24) + request->place;
}

/* An error has ended a run, so nobody can wait for the requests that it began. End the receives whose messages have
 * not been matched, so that they take no later message. A message that has been matched is lost. */
void requests_abandon(int64_t run);

/* MPI matches adjoints that it cannot distinguish in the order in which they are started. In reverse mode that is the
 * order of the waits, from the last to the first. Return the error if a request like this was started before this one
 * and has not been waited for yet. */
ffi_error *request_check_order(const struct call *call, const struct request *request);

/* A blocking adjoint is matched among the adjoints that have been started, too. Return the error if a request of
 * `row`, the nonblocking operation, is in flight with this peer and tag. */
ffi_error *request_check_blocking(const struct call *call, int row, int64_t peer, int64_t tag);

/* From here on a call speaks for the request that it waits for: errors name the operation that was started, and do not
 * show the buffers of the wait. */
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

/* Give back the memory and the place of a request. */
void request_end(struct request *request);

/* Give a request that has no memory yet `bytes` of memory, at `data`. False: out of memory. Called by the thread that
 * has the request, or by the queue for one of the receives; the lock of the table is not needed. */
bool request_room(struct request *request, size_t bytes, char **data);

/* Post a receive, and let the background thread poll for the message. */
void request_post(struct receive *receive);

/* The communicator is revoked. Give up the requests: none of them is named at the end. A request that a thread waits
 * for ends by itself. Return how many were in flight. */
int64_t requests_give_up_on(const struct communicator *comm);

/* The communicator is freed. If it is COMM_SELF, MPI is finalized. Drop the receives and messages. */
void requests_forget(const struct communicator *comm);

/* End the thread and name on stderr the requests that were never waited for. This is done only once. Then complete
 * reductions by users' functions, for at most 5 seconds on all ranks: MPI may call these functions while the reduction
 * is under way, and after the end of Python mpi4py would end the job instead. Return how many are still under way. */
int64_t requests_finish(void);

/* Return how many requests have not been waited for. */
int64_t requests_in_flight(void);

#endif
