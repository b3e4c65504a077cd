/* Compares csrc/devices/nccl.def and nccl.c with the real nccl.h: compiles only if they agree. */
#include <limits.h>
#include <stddef.h>

#include <nccl.h>

#define FUNCTION(name, parameters) ncclResult_t(*const check_##name) parameters = nccl##name;
#include "devices/nccl.def"

_Static_assert(sizeof(ncclResult_t) == sizeof(int) && ncclSuccess == 0, "ncclResult_t");
_Static_assert(sizeof(ncclDataType_t) == sizeof(int) && sizeof(ncclRedOp_t) == sizeof(int), "enumerations");
_Static_assert(ncclInt8 == 0 && ncclUint8 == 1 && ncclInt32 == 2 && ncclUint32 == 3 && ncclInt64 == 4, "integers");
_Static_assert(ncclUint64 == 5 && ncclFloat16 == 6 && ncclFloat32 == 7 && ncclFloat64 == 8, "types");
_Static_assert(ncclBfloat16 == 9, "bfloat16");
_Static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3, "ncclRedOp_t");
_Static_assert(sizeof(ncclUniqueId) == 128 && NCCL_CONFIG_UNDEF_INT == INT_MIN, "what initializes a communicator");
_Static_assert(offsetof(ncclConfig_t, size) == 0 && offsetof(ncclConfig_t, magic) == 8, "size, magic");
_Static_assert(offsetof(ncclConfig_t, version) == 12 && offsetof(ncclConfig_t, blocking) == 16, "version, blocking");
_Static_assert(offsetof(ncclConfig_t, maxCTAs) == 28 && offsetof(ncclConfig_t, netName) == 32, "maxCTAs, netName");
_Static_assert(offsetof(ncclConfig_t, splitShare) == 40, "splitShare");
