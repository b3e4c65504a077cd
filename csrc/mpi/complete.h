/* Completes the MPI operations of a request.
 *
 * Threads: the thread that has taken the request. The thread of requests/progress.h also calls test_begun, under the
 * lock of the table. The functions take the queue's lock. */
#ifndef JAXMPI_COMPLETE_H
#define JAXMPI_COMPLETE_H

#include "mpi/match.h"
#include "requests/table.h"

#define test_handle      ABI_LOCAL(test_handle)
#define test_begun       ABI_LOCAL(test_begun)
#define complete_handles ABI_LOCAL(complete_handles)
#define complete_receive ABI_LOCAL(complete_receive)
#define note_code        ABI_LOCAL(note_code)

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
