/* JAXMPI_TIMEOUT_ACTION=raise: a wait that takes too long ends with an error, if what is waited for is left as it was.
 *
 * That is so of a message that has not been matched: it stays in the channel, for the next receive with its rank and
 * tag. And of a request that the program still has: it can be waited for again. MPI has no way to take back what has
 * been sent, a collective, or a message that has begun to arrive; nothing could be received later of what belongs to a
 * derivative, or to a pytree of which a part has come. Nor may a message be lost that the same run has received: if the
 * program repeated it, the next message would be taken for that one. All these are reported, with the reason, and go
 * on.
 *
 * Threads: deadline_configure is called under the GIL, before the first call, or by a test between two. Any thread may
 * call the rest. No lock is needed. deadline_give_up takes those of the requests.
 */
#ifndef JAXMPI_DEADLINE_H
#define JAXMPI_DEADLINE_H

#include "requests/table.h"

/* After how many seconds; 0: never. */
void deadline_configure(double seconds);

extern atomic_bool deadlines; /* whether there are any; stored after the time that they have */
static inline bool deadlines_on(void) { return atomic_load_explicit(&deadlines, memory_order_acquire); }

/* The time, of the clock of deadline_is_over, at which a wait that begins now ends; never 0. */
double deadline_begin(void);
bool deadline_is_over(double deadline);

/* The time at which the wait of a receive ends; 0: never, for the reason that is told to the watchdog. */
double deadline_of_receive(const struct call *call);

/* Why the wait for a request, by a call of this run, must not end with an error; NULL: it may. */
const char *deadline_refused(const struct call *call, const struct request *request, int64_t run);

/* The time is over: whether an error may end this run. Its receives, and `own` unless NULL, are then no longer posted.
 * False: the message of one has been matched, which is told to the watchdog. */
bool deadline_give_up(int64_t run, struct receive *own);

/* The error of a receive whose time is over; of a wait for a request, in whose words the call is. */
ffi_error *deadline_fail(const struct call *call);
ffi_error *deadline_fail_request(const struct call *call, const struct request *request);

/* A call has succeeded: what it has done is remembered of its run. */
void deadline_note_done(const struct call *call);

#endif
