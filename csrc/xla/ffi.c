#include "xla/ffi.h"

ffi_error *ffi_fail(const ffi_frame *frame, enum ffi_error_code code, const char *message) {
  ffi_error_create_args args = {sizeof args, NULL, message, code};
  return frame->api->error_create(&args); /* cppcheck-suppress returnDanglingLifetime ; the text is copied */
}

void ffi_drop(const ffi_frame *frame, ffi_error *error) {
  frame->api->error_destroy(&(ffi_error_destroy_args){sizeof(ffi_error_destroy_args), NULL, error});
}
