#include "core/buffers.h"

#include <string.h>

#include "core/failure.h"

ffi_error *call_zero(const struct call *call, void *data, size_t bytes) {
  int code = 0;
  if (call->memory->host)
    memset(data, 0, bytes);
  else
    code = call->memory->zero(data, bytes, call->stream);
  return code == 0 ? NULL : call_fail_driver(call, call->memory, code);
}

ffi_error *call_move(const struct call *call, void *to, const void *from, size_t bytes) {
  int code = 0;
  if (call->memory->host)
    memcpy(to, from, bytes);
  else
    code = call->memory->copy(to, from, bytes, call->stream);
  return code == 0 ? NULL : call_fail_driver(call, call->memory, code);
}
