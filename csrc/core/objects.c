#include "core/objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number of a name such as SUM, or of our own "SUM of float16". */
static int basic_of(const char *name) {
  static const char *const names[BASICS] = {"SUM", "PROD", "MAX", "MIN"};
  size_t length = strcspn(name, " ");
  for (int i = 0; i < BASICS; i++)
    if (strlen(names[i]) == length && strncmp(names[i], name, length) == 0) return i;
  return -1;
}

struct reduction *reduction_add(intptr_t handle, enum reducer by, const char *name) {
  struct reduction *reduction = malloc(sizeof *reduction + strlen(name) + 1);
  char stable_key[64];
  if (reduction == NULL) return NULL;
  reduction->handle = handle;
  reduction->by = by;
  reduction->users = NULL;
  memcpy(reduction->name, name, strlen(name) + 1);
  reduction->basic = by == REDUCER_USER ? -1 : basic_of(name);
  snprintf(stable_key, sizeof stable_key, "reduction %s", name);
  reduction->number = registry_add(reduction, by == REDUCER_USER ? NULL : stable_key);
  if (reduction->number != 0) return reduction;
  free(reduction);
  return NULL;
}
