/* FNV-1a by words of 64 bits. The keys of the registry are made of it, so the results may not change.
 *
 * Threads: pure functions, for any thread. */
#ifndef JAXMPI_HASH_H
#define JAXMPI_HASH_H

#include <stdint.h>

#define HASH_START UINT64_C(0xcbf29ce484222325)

static inline uint64_t hash_add(uint64_t hash, int64_t word) {
  return (hash ^ (uint64_t)word) * UINT64_C(0x100000001b3);
}

/* Mix the bits above `bits` into the bits below, which otherwise depend only on the low bits of the words. */
static inline uint64_t hash_fold(uint64_t hash, int bits) { return hash ^ hash >> bits; }

#endif
