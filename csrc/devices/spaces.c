#include "devices/spaces.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

const struct memory *const memory_spaces[] = {
#define SPACE(name) &memory_##name,
#include "devices/spaces.def"
#undef SPACE
    NULL};

static void *find_library(const struct memory *memory, int mode) {
  void *library = NULL;
  for (const char *const *name = memory->libraries; library == NULL && name != NULL && *name != NULL; name++)
    library = dlopen(*name, mode);
  return library;
}

bool memory_loaded(const struct memory *memory) {
  void *library = find_library(memory, RTLD_LAZY | RTLD_NOLOAD);
  if (library != NULL) dlclose(library);
  return library != NULL;
}

static const char *load_driver(const struct memory *memory) {
  enum { ROOM = 128 };
  if (memory->libraries == NULL) return memory->absent;
  /* First look for a copy that this process has loaded: a second copy would not know the streams of the first. */
  void *library = find_library(memory, RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL && (library = find_library(memory, RTLD_LAZY)) == NULL) return memory->absent;
  const char *missing = memory->load(library);
  char *text = missing != NULL ? malloc(ROOM) : NULL; /* never freed; at most one for each driver */
  if (text != NULL) snprintf(text, ROOM, "the driver has no %s: install a newer one", missing);
  return text != NULL ? text : missing;
}

const char *memory_open(const struct memory *memory) {
  static struct {
    bool tried;
    const char *why_not;
  } spaces[sizeof memory_spaces / sizeof *memory_spaces];
  size_t i = 0;
  while (memory_spaces[i] != memory) i++;
  if (!spaces[i].tried && !memory->host) spaces[i].why_not = load_driver(memory);
  spaces[i].tried = true;
  return spaces[i].why_not;
}
