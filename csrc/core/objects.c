#include "core/objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct reduction *reduction_add(intptr_t handle, enum reducer by, const char *name) {
  struct reduction *made = malloc(sizeof *made + strlen(name) + 1);
  char stable_key[64];
  if (made == NULL) return NULL;
  made->handle = handle;
  made->by = by;
  made->users = NULL;
  memcpy(made->name, name, strlen(name) + 1);
  snprintf(stable_key, sizeof stable_key, "reduction %s", name);
  made->number = registry_add(made, by == REDUCER_USER ? NULL : stable_key);
  if (made->number != 0) return made;
  free(made);
  return NULL;
}
