/* The job that this process is a rank of: what its launcher is told, and its end.
 *
 * The launcher may name a folder to ranks on its machine, in JAXMPI_JOB_FOLDER. There a rank leaves files RANK.kind,
 * written at once and whole: `report` (something waits for long), `state` (the answer to a question), `aborts` (it is
 * about to end the job: the code, and in the next line the reason). What the launcher does with them:
 * python/jaxmpi_launch/monitor.py.
 *
 * Threads: any. Nothing here takes a lock; only one at a time may leave files of one kind. */
#ifndef JAXMPI_JOB_H
#define JAXMPI_JOB_H

#include <stdbool.h>
#include <stddef.h>

/* Reads the variable. Called under the GIL, before the first call; again it does nothing. */
void job_begin(void);

/* Whether the launcher has named a folder. */
bool job_has_folder(void);

/* Leaves a file RANK.kind, or nothing where it cannot be written. */
void job_tell(const char *kind, const char *content, size_t length);

/* What the launcher's question file holds, in a text of `size`; empty if it asks nothing now. One thread alone. */
void job_question(char *text, size_t size);

/* Ends the job by MPI_Abort with code 1, and this process in any case. The launcher is told the reason, in one line. */
void job_end(const char *reason);

#endif
