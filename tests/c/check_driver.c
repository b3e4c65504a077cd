/* Compares csrc/devices/cuda.def or hip.def with the real header: compiles only if they agree.
 *
 * DRIVER_HEADER names the header; DRIVER_HIP is defined for HIP's.
 */
#include <stdbool.h>
#include <stddef.h>

#ifndef DRIVER_HIP /* ours, under other names */
#define CUresult      OUR_result
#define CUdevice      OUR_device
#define CUdeviceptr   OUR_deviceptr
#define CUcontext     OUR_context
#define CUevent       OUR_event
#define CUstream      OUR_stream
#define CUhostFn      OUR_function
#define CUDA_MEMCPY2D OUR_MEMCPY2D
#include "devices/cuda_types.h"
#undef CUresult
#undef CUdevice
#undef CUdeviceptr
#undef CUcontext
#undef CUevent
#undef CUstream
#undef CUhostFn
#undef CUDA_MEMCPY2D
#endif

#include DRIVER_HEADER

#include "base/memory.h"

#define OPTIONAL FUNCTION

#ifdef DRIVER_HIP
#define FUNCTION(name, suffix, parameters) hipError_t(*const check_##name) parameters = name##suffix;
#define TEXT(name, parameters)             const char *(*const check_##name)parameters = name;
#if HIP_VERSION < 50600000
hipError_t hipStreamGetDevice(hipStream_t, hipDevice_t *); /* of ROCm 5.6 */
#endif
#include "devices/hip.def"

_Static_assert(hipSuccess == 0 && hipErrorNotReady == 600 && sizeof(hipError_t) == sizeof(int), "hipError_t");
_Static_assert(sizeof(hipDevice_t) == sizeof(int), "hipDevice_t");
_Static_assert(hipMemcpyHostToDevice == 1 && hipMemcpyDeviceToHost == 2 && hipMemcpyDeviceToDevice == 3, "copies");
_Static_assert(hipStreamNonBlocking == 1 && hipEventDisableTiming == 2 && hipHostMallocPortable == 1, "flags");
_Static_assert(hipMallocSignalMemory == 2 && hipStreamWaitValueGte == 0, "flags");
_Static_assert(hipDeviceAttributeCanUseStreamWaitValue == 10013, "hipDeviceAttribute_t");
_Static_assert(sizeof(hipDeviceAttribute_t) == sizeof(int), "hipDeviceAttribute_t");
#else
#define FUNCTION(name, suffix, parameters) CUresult(*const check_##name) parameters = name##suffix;
#include "devices/cuda.def"

_Static_assert(CUDA_SUCCESS == 0 && sizeof(CUresult) == sizeof(int), "CUresult");
_Static_assert(sizeof(CUdeviceptr) == sizeof(OUR_deviceptr), "CUdeviceptr");
#define SAME_PLACE(ours, theirs) \
  _Static_assert(offsetof(OUR_MEMCPY2D, ours) == offsetof(CUDA_MEMCPY2D, theirs), #theirs)
SAME_PLACE(src_type, srcMemoryType);
SAME_PLACE(src_host, srcHost);
SAME_PLACE(src_device, srcDevice);
SAME_PLACE(src_pitch, srcPitch);
SAME_PLACE(dst_type, dstMemoryType);
SAME_PLACE(dst_host, dstHost);
SAME_PLACE(dst_device, dstDevice);
SAME_PLACE(dst_pitch, dstPitch);
SAME_PLACE(width, WidthInBytes);
SAME_PLACE(height, Height);
_Static_assert(sizeof(OUR_MEMCPY2D) == sizeof(CUDA_MEMCPY2D), "CUDA_MEMCPY2D");
_Static_assert(CU_MEMORYTYPE_HOST == (int)MEMORY_HOST && CU_MEMORYTYPE_DEVICE == (int)MEMORY_DEVICE, "CUmemorytype");
_Static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_DISABLE_TIMING == 2, "flags");
_Static_assert(CU_MEMHOSTALLOC_PORTABLE == 1 && CU_MEMHOSTALLOC_DEVICEMAP == 2, "flags");
_Static_assert(CU_STREAM_WAIT_VALUE_GEQ == 0 && CU_STREAM_WRITE_VALUE_DEFAULT == 0, "flags");
_Static_assert(CUDA_ERROR_NOT_SUPPORTED == 801 && CUDA_ERROR_NOT_READY == 600, "CUresult");
#endif
