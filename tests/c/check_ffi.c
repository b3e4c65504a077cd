/* Compares csrc/base/ffi.h and csrc/core/dtype.def with the header of the installed jaxlib: compiles only if they
 * agree.
 *
 * Names differ between releases of jaxlib, but fields do not move. Only names that jaxlib 0.6, 0.10 and 0.12 have are
 * used; the type of an extension is taken from a structure that contains one.
 */
#include <xla/ffi/api/c_api.h>

#include "base/ffi.h"

#define SAME_SIZE(our, their) _Static_assert(sizeof(our) == sizeof(their), "size of " #our)
#define SAME_FIELD(our, our_field, their, their_field)                                                        \
  _Static_assert(offsetof(our, our_field) == offsetof(their, their_field), "offset of " #our "." #our_field); \
  _Static_assert(sizeof(((our *)0)->our_field) == sizeof(((their *)0)->their_field), "size of " #our "." #our_field)
/* The two fields that structures begin with. */
#define SAME_START(our, their)                      \
  SAME_FIELD(our, struct_size, their, struct_size); \
  SAME_FIELD(our, extension, their, extension_start)
#define SAME_VALUE(our, their) _Static_assert((int)our == (int)their, #our)

/* The runtime checks struct_size: ours are those of version 0.1, which end where the last field of then ends. */
#define SAME_END(our, their, their_last) \
  _Static_assert(sizeof(our) == offsetof(their, their_last) + sizeof(((their *)0)->their_last), "end of " #our)

SAME_VALUE(FFI_API_MAJOR, XLA_FFI_API_MAJOR);
_Static_assert(FFI_API_MINOR <= XLA_FFI_API_MINOR, "a later runtime accepts what an earlier one did");

SAME_FIELD(ffi_metadata_extension, base.struct_size, XLA_FFI_Metadata_Extension, extension_base.struct_size);
SAME_FIELD(ffi_metadata_extension, base.type, XLA_FFI_Metadata_Extension, extension_base.type);
SAME_FIELD(ffi_metadata_extension, base.next, XLA_FFI_Metadata_Extension, extension_base.next);
SAME_FIELD(ffi_metadata_extension, metadata, XLA_FFI_Metadata_Extension, metadata);
SAME_SIZE(ffi_metadata_extension, XLA_FFI_Metadata_Extension);
SAME_SIZE(ffi_extension, ((XLA_FFI_Metadata_Extension *)0)->extension_base);
SAME_VALUE(FFI_EXTENSION_METADATA, XLA_FFI_Extension_Metadata);

SAME_START(ffi_version, XLA_FFI_Api_Version);
SAME_FIELD(ffi_version, major, XLA_FFI_Api_Version, major_version);
SAME_FIELD(ffi_version, minor, XLA_FFI_Api_Version, minor_version);
SAME_SIZE(ffi_version, XLA_FFI_Api_Version);

/* Later versions have a longer one; what is behind `traits` is the runtime's and stays as it was. */
SAME_FIELD(ffi_metadata, struct_size, XLA_FFI_Metadata, struct_size);
SAME_FIELD(ffi_metadata, version, XLA_FFI_Metadata, api_version);
SAME_FIELD(ffi_metadata, traits, XLA_FFI_Metadata, traits);
_Static_assert(sizeof(ffi_metadata) <= sizeof(XLA_FFI_Metadata), "size of ffi_metadata");

SAME_START(ffi_buffer, XLA_FFI_Buffer);
SAME_FIELD(ffi_buffer, dtype, XLA_FFI_Buffer, dtype);
SAME_FIELD(ffi_buffer, data, XLA_FFI_Buffer, data);
SAME_FIELD(ffi_buffer, rank, XLA_FFI_Buffer, rank);
SAME_FIELD(ffi_buffer, dims, XLA_FFI_Buffer, dims);
SAME_SIZE(ffi_buffer, XLA_FFI_Buffer);

#define SAME_LIST(theirs, pointers)                   \
  SAME_START(ffi_buffers, theirs);                    \
  SAME_FIELD(ffi_buffers, size, theirs, size);        \
  SAME_FIELD(ffi_buffers, types, theirs, types);      \
  SAME_FIELD(ffi_buffers, buffers, theirs, pointers); \
  SAME_SIZE(ffi_buffers, theirs);                     \
  SAME_SIZE(*((ffi_buffers *)0)->types, *((theirs *)0)->types)
SAME_LIST(XLA_FFI_Args, args);
SAME_LIST(XLA_FFI_Rets, rets);

SAME_FIELD(ffi_span, data, XLA_FFI_ByteSpan, ptr);
SAME_FIELD(ffi_span, size, XLA_FFI_ByteSpan, len);
SAME_SIZE(ffi_span, XLA_FFI_ByteSpan);

SAME_FIELD(ffi_scalar, dtype, XLA_FFI_Scalar, dtype);
SAME_FIELD(ffi_scalar, value, XLA_FFI_Scalar, value);
SAME_SIZE(ffi_scalar, XLA_FFI_Scalar);
SAME_VALUE(FFI_ATTRIBUTE_SCALAR, XLA_FFI_AttrType_SCALAR);

SAME_START(ffi_attributes, XLA_FFI_Attrs);
SAME_FIELD(ffi_attributes, size, XLA_FFI_Attrs, size);
SAME_FIELD(ffi_attributes, types, XLA_FFI_Attrs, types);
SAME_FIELD(ffi_attributes, names, XLA_FFI_Attrs, names);
SAME_FIELD(ffi_attributes, values, XLA_FFI_Attrs, attrs);
SAME_SIZE(ffi_attributes, XLA_FFI_Attrs);
SAME_SIZE(*((ffi_attributes *)0)->types, *((XLA_FFI_Attrs *)0)->types);

SAME_START(ffi_error_create_args, XLA_FFI_Error_Create_Args);
SAME_FIELD(ffi_error_create_args, message, XLA_FFI_Error_Create_Args, message);
SAME_FIELD(ffi_error_create_args, code, XLA_FFI_Error_Create_Args, errc);
SAME_SIZE(ffi_error_create_args, XLA_FFI_Error_Create_Args);

SAME_START(ffi_error_destroy_args, XLA_FFI_Error_Destroy_Args);
SAME_FIELD(ffi_error_destroy_args, error, XLA_FFI_Error_Destroy_Args, error);
SAME_SIZE(ffi_error_destroy_args, XLA_FFI_Error_Destroy_Args);
SAME_VALUE(FFI_INVALID_ARGUMENT, XLA_FFI_Error_Code_INVALID_ARGUMENT);
SAME_VALUE(FFI_FAILED_PRECONDITION, XLA_FFI_Error_Code_FAILED_PRECONDITION);
SAME_VALUE(FFI_UNIMPLEMENTED, XLA_FFI_Error_Code_UNIMPLEMENTED);
SAME_VALUE(FFI_INTERNAL, XLA_FFI_Error_Code_INTERNAL);

SAME_START(ffi_stream_get_args, XLA_FFI_Stream_Get_Args);
SAME_FIELD(ffi_stream_get_args, context, XLA_FFI_Stream_Get_Args, ctx);
SAME_FIELD(ffi_stream_get_args, stream, XLA_FFI_Stream_Get_Args, stream);
SAME_SIZE(ffi_stream_get_args, XLA_FFI_Stream_Get_Args);

SAME_START(ffi_api, XLA_FFI_Api);
SAME_FIELD(ffi_api, version, XLA_FFI_Api, api_version);
SAME_FIELD(ffi_api, internal, XLA_FFI_Api, internal_api);
SAME_FIELD(ffi_api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME_FIELD(ffi_api, error_destroy, XLA_FFI_Api, XLA_FFI_Error_Destroy);
SAME_FIELD(ffi_api, handler_register, XLA_FFI_Api, XLA_FFI_Handler_Register);
SAME_FIELD(ffi_api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME_FIELD(ffi_api, run_get, XLA_FFI_Api, XLA_FFI_RunId_Get);

SAME_START(ffi_run_args, XLA_FFI_RunId_Get_Args);
SAME_FIELD(ffi_run_args, context, XLA_FFI_RunId_Get_Args, ctx);
SAME_FIELD(ffi_run_args, run, XLA_FFI_RunId_Get_Args, run_id);
SAME_SIZE(ffi_run_args, XLA_FFI_RunId_Get_Args);

SAME_START(ffi_frame, XLA_FFI_CallFrame);
SAME_FIELD(ffi_frame, api, XLA_FFI_CallFrame, api);
SAME_FIELD(ffi_frame, context, XLA_FFI_CallFrame, ctx);
SAME_FIELD(ffi_frame, stage, XLA_FFI_CallFrame, stage);
SAME_FIELD(ffi_frame, operands, XLA_FFI_CallFrame, args);
SAME_FIELD(ffi_frame, results, XLA_FFI_CallFrame, rets);
SAME_FIELD(ffi_frame, attributes, XLA_FFI_CallFrame, attrs);
SAME_END(ffi_frame, XLA_FFI_CallFrame, attrs);
SAME_VALUE(FFI_STAGE_INSTANTIATE, XLA_FFI_ExecutionStage_INSTANTIATE);
SAME_VALUE(FFI_STAGE_PREPARE, XLA_FFI_ExecutionStage_PREPARE);
SAME_VALUE(FFI_STAGE_INITIALIZE, XLA_FFI_ExecutionStage_INITIALIZE);
SAME_VALUE(FFI_STAGE_EXECUTE, XLA_FFI_ExecutionStage_EXECUTE);

/* The numbers of dtype.def, whose names are NumPy's. */
enum {
  CODE_bool = XLA_FFI_DataType_PRED,
  CODE_int8 = XLA_FFI_DataType_S8,
  CODE_int16 = XLA_FFI_DataType_S16,
  CODE_int32 = XLA_FFI_DataType_S32,
  CODE_int64 = XLA_FFI_DataType_S64,
  CODE_uint8 = XLA_FFI_DataType_U8,
  CODE_uint16 = XLA_FFI_DataType_U16,
  CODE_uint32 = XLA_FFI_DataType_U32,
  CODE_uint64 = XLA_FFI_DataType_U64,
  CODE_float16 = XLA_FFI_DataType_F16,
  CODE_bfloat16 = XLA_FFI_DataType_BF16,
  CODE_float32 = XLA_FFI_DataType_F32,
  CODE_float64 = XLA_FFI_DataType_F64,
  CODE_complex64 = XLA_FFI_DataType_C64,
  CODE_complex128 = XLA_FFI_DataType_C128,
  CODE_float8_e5m2 = XLA_FFI_DataType_F8E5M2,
  CODE_float8_e3m4 = XLA_FFI_DataType_F8E3M4,
  CODE_float8_e4m3 = XLA_FFI_DataType_F8E4M3,
  CODE_float8_e4m3fn = XLA_FFI_DataType_F8E4M3FN,
  CODE_float8_e4m3b11fnuz = XLA_FFI_DataType_F8E4M3B11FNUZ,
  CODE_float8_e5m2fnuz = XLA_FFI_DataType_F8E5M2FNUZ,
  CODE_float8_e4m3fnuz = XLA_FFI_DataType_F8E4M3FNUZ,
  CODE_float8_e8m0fnu = XLA_FFI_DataType_F8E8M0FNU,
};
#define DATATYPE(code, name, bytes, mpi, kind) _Static_assert(code == (int)CODE_##name, "code of " #name);
#include "core/dtype.def"
#undef DATATYPE
SAME_VALUE(FFI_DTYPE_S64, XLA_FFI_DataType_S64);
SAME_VALUE(FFI_DTYPE_TOKEN, XLA_FFI_DataType_TOKEN);

int main(void) { return 0; }
