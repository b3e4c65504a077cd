/* Completing what a request has begun.
 *
 * Threads: the thread that has taken the request; test_begun also the thread of requests/progress.h, under the
 * lock of the table. They take the queue's lock. */
#ifndef JAXMPI_COMPLETE_H
#define JAXMPI_COMPLETE_H

#include "mpi/match.h"
#include "requests/table.h"

#define test_handle      ABI_LOCAL(test_handle)
#define test_begun       ABI_LOCAL(test_begun)
#define complete_handles ABI_LOCAL(complete_handles)
#define complete_receive ABI_LOCAL(complete_receive)
#define note_code        ABI_LOCAL(note_code)

/* Keeps the first error. What has begun is completed all the same: MPI may be using its memory. */
void note_code(struct request *request, const char *function, int code);

/* Whether it is still under way. Lets MPI progress. */
bool test_handle(struct request *request, intptr_t *handle);

/* Whether what a request has begun is still under way: see struct abi. */
bool test_begun(struct request *request);

/* Waits until all that was begun by a handle is done. */
void complete_handles(struct request *request);

/* Waits until the message of a receive has been received or is matched. False: it never will be; the error is noted,
 * unless the communicator has been freed. */
bool complete_receive(struct request *request, struct receive *receive);

#endif
