/* Memory for the data of requests. Fresh memory of the system costs more than a copy into it, so some is kept.
 *
 * Threads: any. A lock of this file protects it. That lock may be taken under any other. */
#ifndef JAXMPI_REQUEST_MEMORY_H
#define JAXMPI_REQUEST_MEMORY_H

#include <stddef.h>

struct block;

/* Return a block with room for `bytes`, at `data`. NULL: out of memory. */
struct block *block_take(size_t bytes, char **data);

/* Give a block back, which may be NULL. */
void block_give(struct block *block);

#endif
