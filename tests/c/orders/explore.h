/* Explores what a few threads may do with each other by C's memory model: not only all their interleavings, but also
 * which of the earlier values each atomic load may still see. An x86 processor shows few of these, an ARM one more.
 *
 * A program includes the C file that it tests and is compiled with -fsanitize=thread, but without the library of
 * ThreadSanitizer: so each of its accesses of memory calls a function of explore.c, which lets one thread go on at a
 * time. Plain accesses must be ordered by what is atomic; if two are not, this is a data race, which is bad.
 *
 * The model: of each atomic object a list of its values in their order; a thread never sees an older one than it has
 * seen or knows of. By an acquire of what a release has stored it knows what the other thread knew. Accesses that are
 * sequentially consistent are in one order: they see, of each object, no older value than such an access before them
 * has stored or seen; but what is relaxed may be seen by others before such a store that it comes after. A load never
 * sees a value that is stored later, and values are stored in the order of the execution: neither is what the standard
 * says for relaxed accesses, and no code here relies on more than this.
 *
 * Threads: explore and the rest are called by the main thread, REQUIRE, explore_pause and the functions for memory by
 * those that are explored. */
#ifndef JAXMPI_EXPLORE_H
#define JAXMPI_EXPLORE_H

#include <stdbool.h>
#include <stddef.h>

struct exploration {
  const char *name;
  void (*begin)(void);            /* alone, before each execution */
  void (*end)(void);              /* alone, after it; may be NULL */
  void (*const threads[4])(void); /* NULL: fewer */
  int preemptions;                /* of a thread that could go on, at most, in an execution */
};

/* All executions must be good; `explore_bad`: with weaker orders, as told by explore_weaken, one must be bad, so that
 * it is known that the test can fail; then orders are again as the program has them. Both tell the result. */
void explore_good(const struct exploration *exploration);
void explore_bad(const struct exploration *exploration, const char *weaker);

/* From now on stores or loads of what lies there are relaxed; in `begin`: in this execution. */
enum explore_access { EXPLORE_LOADS = 1, EXPLORE_STORES = 2 };
void explore_weaken(const void *first, size_t bytes, enum explore_access accesses);

#define EXPLORE_WEAKER(exploration, object, accesses)            \
  explore_weaken(&(object), sizeof(object), EXPLORE_##accesses); \
  explore_bad(exploration, "relaxed " #accesses " of " #object)

/* The exit status of the program. */
int explore_result(void);

/* The execution is bad unless it is so. */
#define REQUIRE(condition) explore_require(condition, #condition)
void explore_require(bool condition, const char *text);

/* A loop waits for another thread, whose stores are seen afterwards. */
void explore_pause(void);

/* Memory is accessed by nobody else before it is made known, and by nobody once it is freed. Freed at the end of the
 * execution. */
void *explore_calloc(size_t count, size_t bytes);
void explore_free(void *memory);
void *explore_memcpy(void *to, const void *from, size_t bytes);

#endif
