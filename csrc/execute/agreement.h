/* Asks the ranks of a communicator whether a number is the same on all of them.
 *
 * The nth question of one rank belongs to the nth of every other. Questions travel as messages on a duplicate of
 * COMM_WORLD that nothing else uses. So they disturb no communication of the program. Nothing is left on the program's
 * communicators if some ranks never ask, because another library makes their collectives there. Rounds determine the
 * least of the numbers, and of their complements. In round k each rank sends its knowledge to the rank 2^k further. So
 * after log2(size) rounds each rank knows about all.
 *
 * A rank that does not hear from the others in time says so in the remaining rounds, and goes on. Then this question
 * has no answer on the ranks that get this message. A number is best made of all questions so far, so that the next
 * question detects a difference that this one has missed.
 *
 * A communicator must have the same name on all ranks, without asking them. The communicators of the package have a
 * name. Any other is named by its ranks of COMM_WORLD and by how many communicators of the same ranks had a question
 * before. That is the same on all ranks where one thread of the program communicates. So where several do, further
 * communicators ask nothing.
 *
 * Threads: any thread, without the GIL; with runtime.lock held where `serialize` is set. The lock of an agreement is
 * taken for a moment at a time, and MPI is called under it. */
#ifndef JAXMPI_AGREEMENT_H
#define JAXMPI_AGREEMENT_H

#include "core/runtime.h"

enum { QUESTION_BYTES = 72, NOT_ASKED = -1 };
enum answer { ANSWER_SAME, ANSWER_DIFFERENT, ANSWER_NONE, ANSWER_NEVER };

/* The names of the default communicator and of COMM_WORLD. */
enum { NAME_OF_DEFAULT = 1, NAME_OF_WORLD = 2 };

/* Set the ranks of a communicator, so that they can ask each other. `name`: 0, or the same on all of them and on no
 * other communicator. Called once, under the GIL. False: out of memory. */
bool agreement_prepare(struct communicator *comm, int64_t name, const int *ranks);

/* Ask a question. 0: done. NOT_ASKED: it cannot be asked here. Other values: the first error of MPI, after which
 * nothing is asked. `about`: QUESTION_BYTES for the code that hears the answer. */
int agreement_ask(struct communicator *comm, int64_t number, const void *about);

/* Waits for the answers to all questions, `seconds` at most; negative: without end. ANSWER_SAME: all answers say so.
 * ANSWER_DIFFERENT: to the question whose `about` is returned; later ones are still to be heard. ANSWER_NONE: not in
 * time. ANSWER_NEVER: a rank has stopped asking, and this one has, too. */
enum answer agreement_hear(struct communicator *comm, double seconds, void *about);

/* Return whether it is the default communicator, which only this package uses. After a question, the name is final. */
bool agreement_is_of_default(const struct communicator *comm);

/* Return whether some answers have not been heard. */
bool agreement_is_open(const struct communicator *comm);

/* Go on without the answers, after a question, and report this to the others. `for_ever`: ask nothing any more. */
void agreement_leave(struct communicator *comm, bool for_ever);

/* Gather `bytes` of each rank after ANSWER_DIFFERENT, on all ranks; `came`: which ranks' bytes have come within
 * `seconds`. False: `mine` is still in use by MPI. */
bool agreement_gather(struct communicator *comm, const void *mine, void *all, bool *came, size_t bytes, double seconds);

/* End the questions of a communicator that has been freed: it asks nothing any more. */
void agreement_end(struct communicator *comm);

/* Leave nothing under way, before MPI is finalized. */
void agreement_finish(void);

#endif
