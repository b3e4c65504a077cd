/* The timeline, JAXMPI_TRACE: a line with times for each operation, in a file of this rank. The file has the trace
 * format of Chrome and Perfetto: an array of events, whose closing bracket may be missing.
 *
 * Each thread that calls MPI fills blocks of events. The writer, a thread of ours, turns them into text. An operation
 * reads the clock twice, stores a few words, and waits for nothing. If the writer cannot keep up, or the file would
 * exceed the limit, operations are left out and counted.
 *
 * Threads: timeline_open, timeline_note and timeline_close are called under the GIL. The thread that calls MPI for a
 * call calls timeline_begin and timeline_end, one pair after the other. No lock is needed.
 */
#ifndef JAXMPI_TIMELINE_H
#define JAXMPI_TIMELINE_H

#include "core/call.h"

/* Record operations from now on, in a new file of at most `limit` bytes, by the descriptor, which is closed after an
 * error and at the end. It appends, because notes may come between. Return 0, or an error number of the system. */
int timeline_open(int file, int64_t limit);

/* Write a line into the file: an event, with the comma and the line's end. */
void timeline_note(const char *line);

/* Whether operations are recorded. A thread that reads true also sees the data of timeline_open. */
extern atomic_bool timeline_on;
static inline bool timeline_is_on(void) { return atomic_load_explicit(&timeline_on, memory_order_acquire); }

/* False: this operation is not recorded, and has no end. */
bool timeline_begin(const struct call *call);
void timeline_end(const struct call *call, bool failed);

/* A call that waits for several requests has an event for each. End the event of this call, and begin the next one.
 */
void timeline_next(struct call *call, bool failed);

/* Write the rest and how many operations were left out, and end the file. */
void timeline_close(void);

#endif
