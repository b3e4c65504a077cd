/* The watchdog: a thread of ours that reports an operation which has been waiting in MPI for long.
 *
 * Each thread that calls MPI has a record, which it fills as an operation begins. The watchdog reads the records
 * without locks; an operation costs a few stores, and reads no clock: it has waited since the watchdog saw it first.
 *
 * It tells the launcher that it has reported something, and answers what the launcher asks (with a number that is
 * another one for each question): core/job.h.
 *
 * Threads: watchdog_configure is called under the GIL. watchdog_begin and watchdog_end are called by the
 * thread that calls MPI for a call, one pair after the other. The watchdog's own thread takes no lock and needs no GIL.
 */
#ifndef JAXMPI_WATCHDOG_H
#define JAXMPI_WATCHDOG_H

#include "observe/summary.h"

/* What happens to an operation that waits for long: it is reported, or it ends the job, too. */
enum action { ACTION_REPORT, ACTION_ABORT };

/* Before the first call, or by a test between two: after how many seconds an operation is reported (twice as many after
 * each report), what then happens, and what writes where the program is (may be NULL). */
void watchdog_configure(double seconds, enum action action, void (*where)(char *text, size_t size));

/* From now on nothing is reported, and `where` is not called. Without the GIL. */
void watchdog_stop(void);

/* The calling thread's record, NULL if nothing is watched; to be given to watchdog_end. What waits for requests begins
 * with the words of each, in its body. */
struct watched *watchdog_begin(const struct call *call);
struct watched *watchdog_begin_summary(const int64_t summary[], int count);
void watchdog_end(struct watched *record);

#endif
