#include "core/indices.h"

#include <stdlib.h>
#include <string.h>

struct indices *indices_make(const int64_t *values, size_t count) {
  bool wide = false, ascending = true;
  int64_t runs = count > 0;
  for (size_t i = 0; i < count; i++) {
    if (values[i] < 0) return NULL;
    wide |= values[i] > INT32_MAX;
    if (i == 0) continue;
    ascending &= values[i] > values[i - 1];
    runs += values[i] != values[i - 1] + 1;
  }
  const size_t width = wide ? sizeof(int64_t) : sizeof(int32_t);
  struct indices *list = malloc(sizeof *list + count * width + 1);
  if (list == NULL) return NULL;
  list->count = (int64_t)count, list->runs = runs, list->ascending = ascending, list->wide = wide;
  if (wide) memcpy(list->values, values, count * width);
  int32_t *narrow = (int32_t *)(void *)list->values;
  for (size_t i = 0; i < count && !wide; i++) narrow[i] = (int32_t)values[i];
  return list;
}

int64_t indices_run(const struct indices *list, int64_t i) {
  int64_t end = i + 1;
  while (end < list->count && index_at(list, end) == index_at(list, end - 1) + 1) end++;
  return end - i;
}
