#include "devices/memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

_Thread_local const char *memory_failed = "";

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

static const char *load(const struct memory *memory) {
  enum { ROOM = 128 };
  /* A copy that this process has loaded comes first: a second one would not know its streams. */
  void *library = find_library(memory, RTLD_LAZY | RTLD_NOLOAD);
  if (library == NULL && (library = find_library(memory, RTLD_LAZY)) == NULL) return memory->absent;
  const char *missing = memory->load(library);
  char *text = missing != NULL ? malloc(ROOM) : NULL; /* never freed; one per driver at most */
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
  if (!spaces[i].tried && !memory->host) spaces[i].why_not = load(memory);
  spaces[i].tried = true;
  return spaces[i].why_not;
}

int memory_copy_rows(const struct memory *memory, bool up, void *host, void *device, struct rows rows, void *stream) {
  if (rows.on_host == rows.width && rows.on_device == (ptrdiff_t)rows.width) rows.width *= rows.count, rows.count = 1;
  bool at_once = rows_at_once(&rows);
  size_t copies = at_once ? 1 : rows.count;
  if (!at_once) rows.count = 1;
  int code = 0;
  for (size_t i = 0; i < copies && code == 0; i++) {
    char *on_host = (char *)host + i * rows.on_host, *on_device = (char *)device + (ptrdiff_t)i * rows.on_device;
    code = up ? memory->copy_up(on_device, on_host, rows, stream) : memory->copy_down(on_host, on_device, rows, stream);
  }
  return code;
}
