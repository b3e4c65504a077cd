/* The types of CUDA's driver that are used; tests/c/check_driver.c compares them with the real header. */
#ifndef JAXMPI_CUDA_TYPES_H
#define JAXMPI_CUDA_TYPES_H

#include <stddef.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUevent_st *CUevent;
typedef struct CUstream_st *CUstream;
typedef void (*CUhostFn)(void *);

/* A copy of rows. The types are MEMORY_HOST or MEMORY_DEVICE; members that do not apply are zero. */
typedef struct {
  size_t src_x, src_y;
  int src_type;
  const void *src_host;
  CUdeviceptr src_device;
  void *src_array;
  size_t src_pitch;
  size_t dst_x, dst_y;
  int dst_type;
  void *dst_host;
  CUdeviceptr dst_device;
  void *dst_array;
  size_t dst_pitch;
  size_t width, height;
} CUDA_MEMCPY2D;
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };

#endif
