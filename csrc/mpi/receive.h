/* Receives messages that have been matched. The size of a message is compared with the template first: by the standard,
 * a receive into a buffer that is too small is an error. Where one process copies directly from the memory of the
 * other, Open MPI then writes past the end of the buffer, and MPICH promises nothing better. Matching also gives both
 * sizes for the error. A message that does not fit can be taken off the channel, so that the next one is not affected.
 * Matching costs about 0.04 us.
 *
 * Threads: those that call bodies. Any thread that may call MPI calls message_count and message_discard. No lock is
 * taken. */
#ifndef JAXMPI_RECEIVE_H
#define JAXMPI_RECEIVE_H

#include "core/abi.h"
#include "mpi/bodies.h"

#define message_count       ABI_LOCAL(message_count)
#define message_discard     ABI_LOCAL(message_discard)
#define receive_bytes       ABI_LOCAL(receive_bytes)
#define receive_into        ABI_LOCAL(receive_into)
#define receive_matched     ABI_LOCAL(receive_matched)
#define receive_from_memory ABI_LOCAL(receive_from_memory)
#define fail_planned        ABI_LOCAL(fail_planned)

/* Return the size of a matched message in elements of `type`; -1 if it is no whole number of elements, or not known.
 */
int64_t message_count(const MPI_Status *status, MPI_Datatype type);
static inline int64_t message_bytes(const MPI_Status *status) { return message_count(status, bytes_type()); }

/* Receive a matched message as bytes. Return an MPI error code. */
int receive_bytes(MPI_Message *message, void *data, int64_t bytes, MPI_Status *status);

/* Receive a matched message of that many bytes and drop it. Return an MPI error code, or CODE_NO_MEMORY. With
 * CODE_NO_MEMORY the message stays matched and is never received. */
int message_discard(MPI_Message *message, int64_t bytes);

/* Receive a matched message into `out`, as described by `span`; fill the user's status unless that is NULL. */
ffi_error *receive_into(struct call *call, const struct buffer *out, const struct span *span, MPI_Message *message,
                        MPI_Status *status, MPI_Status *users);

/* Receive a matched message, which must fit, into `out`. */
ffi_error *receive_matched(struct call *call, const struct buffer *out, MPI_Message *message, MPI_Status *status);

/* Put a received message, which may have a label, into `out`, if it has the same dtype and fits. `users`: as above. */
ffi_error *receive_from_memory(struct call *call, const struct buffer *out, const char *data, int64_t bytes,
                               MPI_Status *status, MPI_Status *users);

/* Return the error for a message of that many bytes, which is not the one that a plan expects. */
ffi_error *fail_planned(const struct call *c, const struct peer *peer, int64_t bytes);

#endif
