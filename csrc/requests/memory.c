#include "requests/memory.h"

#include <pthread.h>
#include <stdlib.h>

enum { SPARE_BLOCKS = 8, SPARE_BYTES = 1 << 29 };

struct block {
  size_t bytes;
  _Alignas(64) char data[];
};

static struct {
  pthread_mutex_t lock;
  struct block *blocks[SPARE_BLOCKS];
  size_t bytes; /* of these blocks */
} spare = {.lock = PTHREAD_MUTEX_INITIALIZER};

struct block *block_take(size_t bytes, char **data) {
  struct block *block = NULL;
  pthread_mutex_lock(&spare.lock);
  for (int i = 0; i < SPARE_BLOCKS && block == NULL; i++)
    if (spare.blocks[i] != NULL && spare.blocks[i]->bytes >= bytes && spare.blocks[i]->bytes / 2 <= bytes)
      block = spare.blocks[i], spare.blocks[i] = NULL, spare.bytes -= block->bytes;
  pthread_mutex_unlock(&spare.lock);
  if (block == NULL && (block = aligned_alloc(64, (sizeof *block + bytes + 63) / 64 * 64)) != NULL)
    block->bytes = bytes;
  if (block != NULL) *data = block->data;
  return block;
}

/* Keep a block in an empty place, or in the place of the smallest block. Return the block that has no place. */
static struct block *keep_block(struct block *block) {
  int least = 0;
  for (int i = 0; i < SPARE_BLOCKS && spare.blocks[least] != NULL; i++)
    if (spare.blocks[i] == NULL || spare.blocks[i]->bytes < spare.blocks[least]->bytes) least = i;
  struct block *smallest = spare.blocks[least];
  size_t left = spare.bytes - (smallest != NULL ? smallest->bytes : 0);
  if (left + block->bytes > SPARE_BYTES) return block;
  spare.blocks[least] = block;
  spare.bytes = left + block->bytes;
  return smallest;
}

void block_give(struct block *block) {
  if (block == NULL) return;
  pthread_mutex_lock(&spare.lock);
  struct block *dropped = keep_block(block);
  pthread_mutex_unlock(&spare.lock);
  free(dropped);
}
