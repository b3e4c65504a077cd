#include "base/ffi.h"

ffi_error *ffi_fail(const ffi_frame *frame, enum ffi_error_code code, const char *message) {
  ffi_error_create_args args = {sizeof args, NULL, message, code};
  return frame->api->error_create(&args); /* cppcheck-suppress returnDanglingLifetime ; the text is copied */
}

void ffi_drop(const ffi_frame *frame, ffi_error *error) {
  frame->api->error_destroy(&(ffi_error_destroy_args){sizeof(ffi_error_destroy_args), NULL, error});
}

int64_t ffi_run(const ffi_frame *frame) {
  if (frame == NULL || frame->api->struct_size < sizeof(ffi_api) || frame->api->run_get == NULL) return 0;
  ffi_run_args args = {sizeof args, NULL, frame->context, 0};
  ffi_error *error = frame->api->run_get(&args);
  if (error == NULL) return args.run;
  ffi_drop(frame, error);
  return 0;
}
