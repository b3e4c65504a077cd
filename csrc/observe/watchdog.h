/* The watchdog: a thread of ours that reports an operation which has been waiting in MPI for long.
 *
 * Each thread that calls MPI has a record, and fills it when an operation begins. The watchdog reads the records
 * without locks. An operation stores a few words and reads no clock: the watchdog measures the time since it first saw
 * the operation.
 *
 * The watchdog sends its reports to the launcher and answers the launcher's questions, each of which has another
 * number: core/job.h.
 *
 * Threads: watchdog_configure is called under the GIL. The thread that calls MPI for a call calls watchdog_begin and
 * watchdog_end, one pair after the other. The watchdog's thread takes no lock and needs no GIL.
 */
#ifndef JAXMPI_WATCHDOG_H
#define JAXMPI_WATCHDOG_H

#include "observe/summary.h"

/* What happens to an operation that waits for long: it is reported, or it is reported and ends the job. */
enum action { ACTION_REPORT, ACTION_ABORT };

/* Configure the watchdog. Called before the first operation, or by a test between two. An operation is reported after
 * so many seconds, twice as many after each report. Then `action` happens. `where` writes where the program is (may be
 * NULL). */
void watchdog_configure(double seconds, enum action action, void (*where)(char *text, size_t size));

/* Stop reports: from now on nothing is reported, and `where` is not called. Called without the GIL. */
void watchdog_stop(void);

/* Return the calling thread's record, for watchdog_end; NULL if nothing is watched. The body of a wait begins with the
 * words of each request. */
struct watched *watchdog_begin(const struct call *call);
struct watched *watchdog_begin_summary(const int64_t summary[], int count);
void watchdog_end(struct watched *record);

#endif
