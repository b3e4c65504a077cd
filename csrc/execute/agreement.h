/* Asks the ranks of a communicator whether a number is the same on all of them.
 *
 * The nth question of one rank belongs to the nth of every other. Questions travel as messages on a duplicate of
 * COMM_WORLD that nothing else uses, so that they disturb no communication of the program's, and nothing is left on its
 * communicators if some ranks never ask (since they take part in its collectives by another library). The least of the
 * numbers, and of their complements, is found in rounds: in round k each rank tells the one 2^k ranks further what it
 * knows, so that after log2(size) rounds each knows of all.
 *
 * A rank that does not hear from the others in time says so in the remaining rounds, and goes on; then this question
 * has no answer on those to whom that comes. A number is best made of all that has been asked so far, so that the next
 * question finds a difference that this one has missed.
 *
 * A communicator must have the same name on all its ranks, without asking them. Those that come with the package have
 * one; any other is named by its ranks of COMM_WORLD and by how many of the same ranks had a question before. That is
 * the same on all ranks where one thread of the program communicates, so where several do, further ones ask nothing.
 *
 * Threads: any thread, without the GIL; with runtime.lock held where `serialize` is set. The lock of an agreement is
 * taken for a moment at a time, and MPI is called under it. */
#ifndef JAXMPI_AGREEMENT_H
#define JAXMPI_AGREEMENT_H

#include "core/runtime.h"

enum { QUESTION_WORDS = 9 };
enum answer { ANSWER_SAME, ANSWER_DIFFERENT, ANSWER_NONE, ANSWER_NEVER };

/* The names of the default communicator and of COMM_WORLD. */
enum { NAME_OF_DEFAULT = 1, NAME_OF_WORLD = 2 };

/* The ranks of a communicator, by which its ranks can ask each other; `name`: 0, or the same on all of them and on no
 * other communicator. Called once, under the GIL. False: out of memory. */
bool agreement_prepare(struct communicator *comm, int64_t name, const int *ranks);

/* False: it cannot be asked here. `words` are for whoever hears the answer. */
bool agreement_ask(struct communicator *comm, int64_t number, const int64_t words[QUESTION_WORDS]);

/* Waits for the answers to all that has been asked, `seconds` at most; negative: without end. ANSWER_SAME: to all of
 * them. ANSWER_DIFFERENT: to the one that `words` then are of; later ones are still to be heard. ANSWER_NONE: not in
 * time. ANSWER_NEVER: a rank has stopped asking, and this one has, too. */
enum answer agreement_hear(struct communicator *comm, double seconds, int64_t words[QUESTION_WORDS]);

/* The first error of MPI, after which it asks nothing; 0: none. */
int agreement_code(const struct communicator *comm);

/* Whether it is the default communicator, of which nobody but this package knows. */
bool agreement_is_of_default(const struct communicator *comm);

/* Whether some have not been heard. */
bool agreement_is_open(const struct communicator *comm);

/* Goes on without the answers, and says so to the others. */
void agreement_leave(struct communicator *comm);

/* Asks nothing on this communicator from now on, and says so to the others. */
void agreement_stop(struct communicator *comm);

/* After ANSWER_DIFFERENT, on all ranks: what each rank tells, `bytes` of it, and from whom it has come within
 * `seconds`. False: `mine` is still in use by MPI. */
bool agreement_gather(struct communicator *comm, const void *mine, void *all, bool *came, size_t bytes, double seconds);

/* The communicator has been freed: it asks nothing any more. */
void agreement_end(struct communicator *comm);

/* Before MPI is finalized: nothing is left under way. */
void agreement_finish(void);

#endif
