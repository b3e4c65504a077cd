#include "core/indices.h"

#include <stdlib.h>
#include <string.h>

struct indices *indices_make(const int64_t *values, size_t count) {
  bool wide = false;
  for (size_t i = 0; i < count; i++) {
    if (values[i] < 0) return NULL;
    wide |= values[i] > INT32_MAX;
  }
  const size_t width = wide ? sizeof(int64_t) : sizeof(int32_t);
  struct indices *list = malloc(sizeof *list + count * width + 1);
  if (list == NULL) return NULL;
  list->count = (int64_t)count, list->wide = wide;
  if (wide) memcpy(list->values, values, count * width);
  int32_t *narrow = (int32_t *)(void *)list->values;
  for (size_t i = 0; i < count && !wide; i++) narrow[i] = (int32_t)values[i];
  return list;
}
