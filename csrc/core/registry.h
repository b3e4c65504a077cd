/* The registry: the objects to which compiled programs refer by number: communicators, reductions, plans, statuses and
 * texts. A program may outlive the process, in a cache of compiled code or in a file. Then its number must not stand
 * for another object in another process. So a number consists of a place, in the low PLACE_BITS bits, and above it a
 * key, which must equal the key of the object at that place: 63 bits together, never negative, never 0.
 *
 * The key of an object with a `stable_key` is a hash of this text, which differs from all others in every run of a
 * program. If these objects are also added in the same order in each run, their numbers are the same, and programs of
 * an earlier run can use them. All other objects have the key of this process.
 *
 * Objects are never removed.
 *
 * Threads: objects are added under the GIL; any thread may look up, without a lock. */
#ifndef JAXMPI_REGISTRY_H
#define JAXMPI_REGISTRY_H

#include <stdint.h>

enum { PLACE_BITS = 24, KEY_BITS = 39 };
void registry_begin(uint64_t key); /* this process's key, random; called before anything is added */
int64_t registry_add(void *object, const char *stable_key); /* the number; 0: out of memory. `stable_key` may be NULL */
int64_t registry_reserve(const char *stable_key); /* the number of an object to be added with this stable key */
void *registry_at(int64_t number);                /* NULL: no object has this number */

#endif
