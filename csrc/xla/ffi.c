#include "xla/ffi.h"

bool ffi_answer_metadata(ffi_frame *frame) {
  ffi_extension *extension = frame->extension;
  if (extension == NULL || extension->type != FFI_EXTENSION_METADATA) return false;
  ffi_metadata *metadata = ((ffi_metadata_extension *)extension)->metadata;
  metadata->version.major = FFI_API_MAJOR;
  metadata->version.minor = FFI_API_MINOR;
  metadata->traits = 0;
  return true;
}

ffi_error *ffi_fail(const ffi_frame *frame, enum ffi_error_code code, const char *message) {
  ffi_error_create_args args = {sizeof args, NULL, message, code};
  return frame->api->error_create(&args); /* cppcheck-suppress returnDanglingLifetime ; the text is copied */
}

int64_t ffi_count(const ffi_buffer *buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer->rank; i++) count *= buffer->dims[i];
  return count;
}
