/* XLA's foreign function interface, API 0.1, declared by us.
 *
 * The header that jaxlib ships is not used: the ABI is stable, the header is not. Type names change between releases,
 * and a build against the header would tie the result to one jaxlib. Only the structures of version 0.1 are declared
 * here; every later runtime accepts them. tests/c/check_ffi.c compares sizes and offsets with the header of the
 * installed jaxlib.
 *
 * Ownership: a frame and everything it points to belong to XLA and live until the handler returns. An error that a
 * handler returns belongs to XLA from then on. NULL means success.
 *
 * Threads: the thread in which XLA called the handler calls the functions at the end; they need no lock.
 */
#ifndef JAXMPI_FFI_H
#define JAXMPI_FFI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FFI_API_MAJOR = 0, FFI_API_MINOR = 1 };
enum ffi_extension_type { FFI_EXTENSION_METADATA = 1 };
enum ffi_stage { FFI_STAGE_INSTANTIATE = 0, FFI_STAGE_PREPARE = 1, FFI_STAGE_INITIALIZE = 2, FFI_STAGE_EXECUTE = 3 };
enum ffi_attribute_type { FFI_ATTRIBUTE_SCALAR = 3 };
enum ffi_error_code {
  FFI_INVALID_ARGUMENT = 3,
  FFI_FAILED_PRECONDITION = 9,
  FFI_UNIMPLEMENTED = 12,
  FFI_INTERNAL = 13,
  FFI_UNAVAILABLE = 14
};
enum {
  FFI_DTYPE_PRED = 1,
  FFI_DTYPE_S8 = 2,
  FFI_DTYPE_S16 = 3,
  FFI_DTYPE_S32 = 4,
  FFI_DTYPE_S64 = 5,
  FFI_DTYPE_U8 = 6,
  FFI_DTYPE_U16 = 7,
  FFI_DTYPE_U32 = 8,
  FFI_DTYPE_U64 = 9,
  FFI_DTYPE_F16 = 10,
  FFI_DTYPE_F32 = 11,
  FFI_DTYPE_F64 = 12,
  FFI_DTYPE_C64 = 15,
  FFI_DTYPE_BF16 = 16,
  FFI_DTYPE_TOKEN = 17,
  FFI_DTYPE_C128 = 18
};

typedef struct ffi_error ffi_error; /* opaque */

typedef struct ffi_extension {
  size_t struct_size;
  enum ffi_extension_type type;
  struct ffi_extension *next;
} ffi_extension;

typedef struct ffi_version {
  size_t struct_size;
  ffi_extension *extension;
  int major;
  int minor;
} ffi_version;

typedef struct ffi_metadata {
  size_t struct_size;
  ffi_version version; /* out */
  uint32_t traits;     /* out */
} ffi_metadata;

typedef struct ffi_metadata_extension {
  ffi_extension base;
  ffi_metadata *metadata;
} ffi_metadata_extension;

typedef struct ffi_buffer {
  size_t struct_size;
  ffi_extension *extension;
  int dtype; /* a code of dtype.def, or FFI_DTYPE_TOKEN */
  void *data;
  int64_t rank;
  int64_t *dims; /* `rank` of them */
} ffi_buffer;

/* The operands, or the results. */
typedef struct ffi_buffers {
  size_t struct_size;
  ffi_extension *extension;
  int64_t size;
  int *types;
  void **buffers; /* each an ffi_buffer */
} ffi_buffers;

typedef struct ffi_span {
  const char *data; /* not null-terminated */
  size_t size;
} ffi_span;

typedef struct ffi_scalar {
  int dtype;
  void *value;
} ffi_scalar;

typedef struct ffi_attributes {
  size_t struct_size;
  ffi_extension *extension;
  int64_t size;
  int *types;
  ffi_span **names; /* sorted */
  void **values;    /* an ffi_scalar if the type is FFI_ATTRIBUTE_SCALAR */
} ffi_attributes;

typedef struct ffi_error_create_args {
  size_t struct_size;
  ffi_extension *extension;
  const char *message; /* copied by the runtime */
  enum ffi_error_code code;
} ffi_error_create_args;

typedef struct ffi_error_destroy_args {
  size_t struct_size;
  ffi_extension *extension;
  ffi_error *error;
} ffi_error_destroy_args;

typedef struct ffi_stream_get_args {
  size_t struct_size;
  ffi_extension *extension;
  void *context;
  void *stream; /* out */
} ffi_stream_get_args;

typedef struct ffi_run_args {
  size_t struct_size;
  ffi_extension *extension;
  void *context;
  int64_t run; /* out */
} ffi_run_args;

/* The beginning of the runtime's function table, up to the last function used here. That is later than 0.1, so it may
 * be missing: see `struct_size`. */
typedef struct ffi_api {
  size_t struct_size;
  ffi_extension *extension;
  ffi_version version;
  void *internal;
  ffi_error *(*error_create)(ffi_error_create_args *);
  void *error_get_message;
  void (*error_destroy)(ffi_error_destroy_args *);
  void *handler_register;
  ffi_error *(*stream_get)(ffi_stream_get_args *);
  void *others[11];
  ffi_error *(*run_get)(ffi_run_args *);
} ffi_api;

typedef struct ffi_frame {
  size_t struct_size;
  ffi_extension *extension;
  const ffi_api *api;
  void *context;
  enum ffi_stage stage;
  ffi_buffers operands;
  ffi_buffers results;
  ffi_attributes attributes;
} ffi_frame;

typedef ffi_error *ffi_handler(ffi_frame *frame);

/* If the frame is a query of the API version, answers it and returns true. */
static inline bool ffi_answer_metadata(ffi_frame *frame) {
  ffi_extension *extension = frame->extension;
  if (extension == NULL || extension->type != FFI_EXTENSION_METADATA) return false;
  ffi_metadata *metadata = ((ffi_metadata_extension *)extension)->metadata;
  metadata->version.major = FFI_API_MAJOR;
  metadata->version.minor = FFI_API_MINOR;
  metadata->traits = 0;
  return true;
}

/* A new error with a copy of the text. */
ffi_error *ffi_fail(const ffi_frame *frame, enum ffi_error_code code, const char *message);

/* Free an error that is not returned. */
void ffi_drop(const ffi_frame *frame, ffi_error *error);

/* The number of the execution of a program that the frame belongs to; 0: not known, or not XLA's. Executions that are
 * under way at one time have different numbers. XLA adds one to a hash of the program each time, so numbers repeat in
 * long jobs. */
int64_t ffi_run(const ffi_frame *frame);

/* The product of the dimensions: 1 for a scalar. */
static inline int64_t ffi_count(const ffi_buffer *buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer->rank; i++) count *= buffer->dims[i];
  return count;
}

#endif
