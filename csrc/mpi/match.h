/* Matches messages, for the queue of receives and for a thread that waits for one, and completes the MPI operations of
 * a request.
 *
 * Threads: those that call bodies, and of a request the one that has taken it. Any thread that may call MPI calls
 * probe_message, match_message and receive_message, under the queue's lock. The other functions take that lock
 * themselves. The thread of requests/progress.h also calls test_begun, under the lock of the table. */
#ifndef JAXMPI_MATCH_H
#define JAXMPI_MATCH_H

#include "mpi/receive.h"
#include "requests/table.h"

#define probe_message        ABI_LOCAL(probe_message)
#define match_message        ABI_LOCAL(match_message)
#define receive_message      ABI_LOCAL(receive_message)
#define await_posted_message ABI_LOCAL(await_posted_message)
#define add_unexpected       ABI_LOCAL(add_unexpected)
#define test_handle          ABI_LOCAL(test_handle)
#define test_begun           ABI_LOCAL(test_begun)
#define complete_handles     ABI_LOCAL(complete_handles)
#define complete_receive     ABI_LOCAL(complete_receive)
#define note_code            ABI_LOCAL(note_code)

/* See struct abi. */
int probe_message(const struct communicator *comm, int source, int tag, bool *there, struct message_info *info);
int match_message(const struct communicator *comm, int source, int tag, bool *there, struct message_info *info);
void receive_message(struct receive *receive);

static inline MPI_Status *status_of(struct receive *receive) { return (MPI_Status *)(void *)receive->info.status; }

/* Match a message for a blocking receive, after the receives that are posted. */
ffi_error *await_posted_message(struct call *call, int source, int tag, MPI_Message *message, MPI_Status *status);

/* Keep a matched message until the receive that it fits begins. */
ffi_error *add_unexpected(const struct call *call, MPI_Message message, const MPI_Status *status);

/* Return whether receives are posted or messages are kept on a communicator. Then the queue matches messages. */
static inline bool is_in_order_of_queue(const struct communicator *comm) {
  return atomic_load_explicit(&comm->queued, memory_order_relaxed) > 0;
}

/* Wait for a message and match it. A receive with any tag does not get the messages of exchanges that other ranks
 * have started. */
static inline ffi_error *await_message(struct call *call, int source, int tag, MPI_Message *message,
                                       MPI_Status *status) {
  if (is_in_order_of_queue(call->comm)) return await_posted_message(call, source, tag, message, status);
  TRY_MPI(call, Mprobe, source, tag, handle_of_comm(call->comm), message, status);
  if (tag != ABI_ANY_TAG || status->MPI_SOURCE == ABI_PROC_NULL || !is_of_plans(status->MPI_TAG)) return NULL;
  PASS(add_unexpected(call, *message, status));
  return await_posted_message(call, source, tag, message, status);
}

/* Keep the first error. The other operations are completed all the same, because MPI may be using their memory. */
void note_code(struct request *request, const char *function, int code);

/* Return whether the operation of a handle is still under way. Let MPI progress. */
bool test_handle(struct request *request, intptr_t *handle);

/* Return whether an operation that a request has begun is still under way: see struct abi. */
bool test_begun(struct request *request);

/* Wait until the operations of all handles are done. */
void complete_handles(struct request *request);

/* Wait until the message of a receive has been received or is matched. False: it never will be. Then the error is
 * noted, unless the communicator has been freed. */
bool complete_receive(struct request *request, struct receive *receive);

#endif
