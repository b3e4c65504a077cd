#include "core/registry.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/hash.h"

struct entry {
  int64_t number;
  void *_Atomic object; /* NULL: reserved */
};

enum { BLOCK = 1024, BLOCKS = 4096 };
static struct entry *blocks[BLOCKS];
static atomic_int_least64_t registered; /* stored after the entry is complete */
static int64_t process_key;

static inline struct entry *entry_at(int64_t place) { return &blocks[(place - 1) / BLOCK][(place - 1) % BLOCK]; }

static int64_t key_of(const char *stable_key) {
  uint64_t hash = HASH_START;
  for (; *stable_key != '\0'; stable_key++) hash = hash_add(hash, (unsigned char)*stable_key);
  return (int64_t)(hash_fold(hash, KEY_BITS) & ((1ull << KEY_BITS) - 1));
}

void registry_begin(uint64_t key) { process_key = (int64_t)(key & ((1ull << KEY_BITS) - 1)); }

static int64_t append(void *object, int64_t key) {
  int64_t place = atomic_load(&registered) + 1;
  if (place > (int64_t)BLOCK * BLOCKS) return 0;
  struct entry **block = &blocks[(place - 1) / BLOCK];
  if (*block == NULL && (*block = calloc(BLOCK, sizeof **block)) == NULL) return 0;
  struct entry *entry = entry_at(place);
  entry->number = key << PLACE_BITS | place;
  atomic_store(&entry->object, object);
  atomic_store_explicit(&registered, place, memory_order_release);
  return entry->number;
}

int64_t registry_reserve(const char *stable_key) { return append(NULL, key_of(stable_key)); }

int64_t registry_add(void *object, const char *stable_key) {
  if (stable_key == NULL) return append(object, process_key);
  int64_t key = key_of(stable_key), last = atomic_load(&registered);
  for (int64_t place = 1; place <= last; place++) {
    struct entry *entry = entry_at(place);
    if (entry->number >> PLACE_BITS != key || atomic_load(&entry->object) != NULL) continue;
    atomic_store_explicit(&entry->object, object, memory_order_release);
    return entry->number;
  }
  return append(object, key);
}

void *registry_at(int64_t number) {
  int64_t place = number & ((1 << PLACE_BITS) - 1);
  if (place < 1 || place > atomic_load_explicit(&registered, memory_order_acquire)) return NULL;
  struct entry *entry = entry_at(place);
  return entry->number == number ? atomic_load_explicit(&entry->object, memory_order_acquire) : NULL;
}
