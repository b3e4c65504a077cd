#include "memory.h"

#include <stdio.h>
#include <stdlib.h>

_Thread_local const char *memory_failed = "";

const struct memory *const memory_spaces[] = {&memory_host, &memory_cuda, &memory_rocm, &memory_sycl, NULL};

const char *memory_lacks(const char *function) {
  enum { ROOM = 128 };
  char *text = function != NULL ? malloc(ROOM) : NULL; /* kept for ever, once for each driver */
  if (text != NULL) snprintf(text, ROOM, "the driver has no %s: install a newer one", function);
  return text != NULL ? text : function;
}

const char *memory_open(const struct memory *memory) {
  static struct {
    bool tried;
    const char *why_not;
  } spaces[sizeof memory_spaces / sizeof *memory_spaces];
  size_t i = 0;
  while (memory_spaces[i] != memory) i++;
  if (!spaces[i].tried && memory->load != NULL) spaces[i].why_not = memory->load();
  spaces[i].tried = true;
  return spaces[i].why_not;
}
