/* Calls of MPI that are left to a stream: the thread that enqueues a call does not wait for MPI.
 *
 * callback  A function of the host, which the driver's callback thread calls in the order of the stream, calls MPI.
 * flags     Two words of memory, which streams and the host access, belong to a stream state. When the turn of a call
 *           comes, the stream writes a number to the first word. A thread of ours waits for this number, calls MPI and
 *           writes the number to the second word, for which the stream waits. This takes a third of the time of a
 *           callback.
 *
 * Our thread makes the calls in the order in which they were enqueued, on all streams together: ranks with several
 * streams then agree on the order. No call waits for a later one, because a stream can only wait for work enqueued
 * before. The thread itself calls no function of the driver, because the call might wait for a lock of the driver,
 * whose owner waits for the stream. In this thread MPI may call the driver.
 *
 * The numbers of a pair of flags count up. The calls of a state have an order, on whichever stream of the state they
 * are, so the words never go back. The drivers compare numbers above INT32_MAX in different ways. So the count begins
 * again before it gets there, once the stream has ended all work.
 *
 * A stream waits for ever only if MPI does: our thread writes the number even if MPI has failed. After an error of the
 * device the stream writes no more numbers. The thread that gets this error from the driver drops the calls
 * (jobs_drop).
 *
 * Threads: a thread that has the stream state and has entered the context calls the functions. They take the lock of
 * the queue for a moment. Our thread holds this lock only while it looks at the queue.
 */
#ifndef JAXMPI_JOBS_H
#define JAXMPI_JOBS_H

#include "core/call.h"

/* The flags of a stream state; zeros: not made. */
struct flags {
  const struct memory *memory;
  _Atomic uint32_t *asked; /* the last call whose turn has come: streams write, our thread reads */
  _Atomic uint32_t *done;  /* the last call that has ended: our thread writes, streams read */
  uint32_t given;          /* the last call that was left to a stream */
  bool refused;            /* the device does not have flags */
};

/* Make the flags at the first call. Return 0 or the driver's code. Set `refused` if streams of this device cannot write
 * values and wait for them. */
int flags_make(struct flags *flags, const struct memory *memory, void *stream);
void flags_free(struct flags *flags);

/* Leave the call `part` to the stream, by flags or, if `flags` is NULL, by a callback. An error is an error of `call`,
 * and then nobody executes `part`. */
ffi_error *job_give(const struct call *call, const struct call *part, struct flags *flags, void *stream);

/* Drop the calls that MPI has not got yet, and defer `code` as an error of the first one. Called after the driver has
 * failed with this code, when nobody knows whether the stream goes on. If it does, it does not wait for the dropped
 * calls and copies invalid results up. Return whether MPI is still executing a call. */
bool jobs_drop(struct flags *flags, int code);

/* The largest number, after which the count begins again. Tests change it. */
extern uint32_t flags_last;

#endif
