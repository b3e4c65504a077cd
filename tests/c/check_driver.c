/* Holds csrc/cuda.def or csrc/hip.def against the real header: compiles only where they agree.
 *
 * DRIVER_HEADER names the header; DRIVER_HIP is defined for HIP's.
 */
#include DRIVER_HEADER

#include <stdbool.h>

#include "memory.h"

#ifdef DRIVER_HIP
#define FUNCTION(name, suffix, parameters) hipError_t(*const check_##name) parameters = name##suffix;
#define TEXT(name, parameters)             const char *(*const check_##name)parameters = name;
#if HIP_VERSION < 50600000
hipError_t hipStreamGetDevice(hipStream_t, hipDevice_t *); /* of ROCm 5.6 */
#endif
#include "hip.def"

_Static_assert(hipSuccess == 0 && sizeof(hipError_t) == sizeof(int), "hipError_t");
_Static_assert(sizeof(hipDevice_t) == sizeof(int), "hipDevice_t");
_Static_assert(hipMemcpyHostToDevice == 1 && hipMemcpyDeviceToHost == 2 && hipMemcpyDeviceToDevice == 3, "copies");
_Static_assert(hipStreamNonBlocking == 1 && hipEventDisableTiming == 2 && hipHostMallocPortable == 1, "flags");
#else
#define FUNCTION(name, suffix, parameters) CUresult(*const check_##name) parameters = name##suffix;
#include "cuda.def"

_Static_assert(CUDA_SUCCESS == 0 && sizeof(CUresult) == sizeof(int), "CUresult");
_Static_assert(sizeof(CUdeviceptr) == sizeof(unsigned long long), "CUdeviceptr");
_Static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_DISABLE_TIMING == 2, "flags");
_Static_assert(CU_MEMHOSTALLOC_PORTABLE == 1, "flags");
#endif
