/* Lists of indices: places of parts of an array that no stride reaches, for example the rows of a mesh that another
 * rank needs. Python makes each list once. The boxes of any number of plans refer to it by the number in the registry.
 *
 * Threads: indices_make is called under the GIL; a list is never changed or freed.
 */
#ifndef JAXMPI_INDICES_H
#define JAXMPI_INDICES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct indices {
  int64_t count;
  bool wide; /* 64 bits each; otherwise 32 */
  int64_t values[];
};

/* NULL: out of memory, or an index is negative. */
struct indices *indices_make(const int64_t *values, size_t count);

static inline int64_t index_at(const struct indices *list, int64_t i) {
  return list->wide ? list->values[i] : ((const int32_t *)(const void *)list->values)[i];
}

#endif
