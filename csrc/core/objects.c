#include "core/objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct reduction *reduction_add(intptr_t handle, enum reducer by, const char *name) {
  struct reduction *reduction = malloc(sizeof *reduction + strlen(name) + 1);
  char stable_key[64];
  if (reduction == NULL) return NULL;
  reduction->handle = handle;
  reduction->by = by;
  reduction->users = NULL;
  memcpy(reduction->name, name, strlen(name) + 1);
  snprintf(stable_key, sizeof stable_key, "reduction %s", name);
  reduction->number = registry_add(reduction, by == REDUCER_USER ? NULL : stable_key);
  if (reduction->number != 0) return reduction;
  free(reduction);
  return NULL;
}
