/* Calls of MPI that are left to a stream: the thread that enqueues them does not wait.
 *
 * callback  A function of the host, which the driver's callback thread calls in the order of the stream, calls MPI.
 * flags     Two words of memory, which streams and the host access, belong to a stream state. When the turn of a call
 *           comes, the stream writes a number to the first word. A thread of ours waits for this number, calls MPI and
 *           writes the number to the second word, for which the stream waits. This takes a third of the time.
 *
 * Our thread makes the calls in the order in which they were enqueued, on all streams together: ranks with several
 * streams then agree on the order. No call waits for a later one, because a stream can only wait for work enqueued
 * before. The thread itself calls no function of the driver: the call might wait for a lock of the driver, whose owner
 * waits for the stream. MPI may call the driver there.
 *
 * The numbers of a pair of flags count up. A state's calls have an order, on whichever stream of the state they are, so
 * the words never go back. Before a number would be negative as a signed one, where the drivers' comparisons differ,
 * the count begins again, once the stream is done.
 *
 * A stream waits for ever only if MPI does: the number is written even if MPI has failed. After an error of the device
 * no more numbers come. The thread that gets this error from the driver drops the calls (jobs_drop).
 *
 * Threads: the functions are called by a thread that has the stream state and has entered the context. They take the
 * lock of the queue for a moment. Our thread holds it only while it looks at the queue.
 */
#ifndef JAXMPI_JOBS_H
#define JAXMPI_JOBS_H

#include "core/call.h"

/* The flags of a stream state; zeros: not made. */
struct flags {
  const struct memory *memory;
  _Atomic uint32_t *asked; /* the last call whose turn has come: streams write, our thread reads */
  _Atomic uint32_t *done;  /* the last call that is done: our thread writes, streams read */
  uint32_t given;          /* the last call that a stream has */
  bool refused;            /* the device does not have flags */
};

/* Make the flags, if that was not done before: 0, or the driver's code. Afterwards `refused` is set if streams of this
 * device cannot write and wait for values. */
int flags_make(struct flags *flags, const struct memory *memory, void *stream);
void flags_free(struct flags *flags);

/* Leave the call `part` to the stream, by flags or, where they are NULL, by a callback. The error is an error of
 * `call`. After an error nothing of it is done any more. */
ffi_error *job_give(const struct call *call, const struct call *part, struct flags *flags, void *stream);

/* After the driver has failed with this code, when nobody knows whether the stream goes on. Drop calls that MPI has
 * not got yet, and defer the code as an error of the first one. The stream does not wait for them, and copies invalid
 * results up. Return whether MPI still has another call. */
bool jobs_drop(struct flags *flags, int code);

/* The last number before the count begins again. Tests change it. */
extern uint32_t flags_last;

#endif
