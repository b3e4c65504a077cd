/* The timeline, JAXMPI_TRACE: a line for each operation, with its times, in a file of this rank's, in the trace format
 * of Chrome and Perfetto (an array of events, whose closing bracket may be missing).
 *
 * Each thread that calls MPI fills blocks of its own; a thread of ours turns them into text. An operation costs two
 * readings of the clock and some stores, and waits for nothing. If the writer cannot keep up, or the file would get
 * longer than its limit, operations are left out and counted.
 *
 * Threads: timeline_open, timeline_note and timeline_close are called under the GIL. timeline_begin and timeline_end
 * are called by the thread that calls MPI for a call, one pair after the other. No lock is needed.
 */
#ifndef JAXMPI_TIMELINE_H
#define JAXMPI_TIMELINE_H

#include "core/call.h"

/* From now on operations are recorded, in a new file of at most `limit` bytes: private_create. An error number of the
 * system's, with a text that is never freed; 0. */
int timeline_open(const char *folder, const char *name, int64_t limit, const char **reason);

/* Writes a line into the file: an event, with the comma and the line's end. */
void timeline_note(const char *line);

/* Whether operations are recorded. Who sees that they are also sees what timeline_open has made. */
extern atomic_bool timeline_on;
static inline bool timeline_is_on(void) { return atomic_load_explicit(&timeline_on, memory_order_acquire); }

/* False: this operation is not recorded, and has no end. */
bool timeline_begin(const struct call *call);
void timeline_end(const struct call *call, bool failed);

/* A call that waits for several requests has an event for each: what is recorded of this call so far was of one, and
 * the next one begins. */
void timeline_next(struct call *call, bool failed);

/* Writes the rest, with how many operations were left out, and ends the file. */
void timeline_close(void);

#endif
