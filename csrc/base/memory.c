#include "base/memory.h"

_Thread_local const char *memory_failed = "";

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
