#!/bin/sh
# Compiles check_mpi.c, check_ffi.c, check_driver.c or check_nccl.c against real headers:
# check_headers.sh mpi|ffi|cuda|hip|nccl CSRC COMPILER...
#
# JAXMPI_MPI_INCLUDE: directories with an mpi.h, and perhaps an mpi_abi.h beside it, separated by colons.
# JAXMPI_FFI_INCLUDE: likewise those that hold xla/ffi/api/c_api.h; python -c "import jax.ffi; print(jax.ffi.include_dir())"
# JAXMPI_CUDA_INCLUDE, JAXMPI_HIP_INCLUDE: those that hold cuda.h, and hip/hip_runtime_api.h.
# JAXMPI_NCCL_INCLUDE: those that hold nccl.h; cuda_runtime.h is found in those of JAXMPI_CUDA_INCLUDE.
# Nothing given: the test is skipped (exit status 77).
kind=$1 csrc=$2
shift 2
here=$(dirname "$0")
status=0

compile() { # text, then the options
  echo "$1"
  shift
  "$@" || status=1
}
strict="-std=gnu11 -fsyntax-only -Wall -Wextra -Wconversion -Werror -Werror=incompatible-pointer-types"

# The ABI of a header, told by what it defines.
abi_of() { # header, directory, compiler...
  header=$1 directory=$2
  shift 2
  macros=$(echo "#include <$header>" | "$@" -isystem "$directory" -E -dM -x c -) || return
  case $macros in
    *"#define OPEN_MPI "*) echo openmpi ;;
    *"#define MPICH_VERSION "* | *"#define I_MPI_VERSION "*) echo mpich ;;
    *"#define MPI_ABI_VERSION "*) echo mpiabi ;;
  esac
}

check_mpi() { # directory, compiler...
  directory=$1
  shift
  for header in mpi.h mpi_abi.h; do
    [ -e "$directory/$header" ] || [ $header = mpi.h ] || continue
    abi=$(abi_of $header "$directory" "$@")
    [ -n "$abi" ] || { echo "$directory/$header: of no ABI known here" && status=1 && continue; }
    compile "$directory/$header: $abi" "$@" $strict -I"$csrc" -isystem "$directory" \
      -DMPI_HEADER="<$header>" -DABI_HEADER="\"mpi/abi/$abi.h\"" "$here/check_mpi.c"
  done
}

check() { # directory, compiler...
  directory=$1
  shift
  compile "$directory" "$@" -std=gnu11 -fsyntax-only -Wall -Wextra -Werror -I"$csrc" -isystem "$directory" $options "$here/$source"
}

# Headers of systems: their own warnings are not ours.
source=check_driver.c
case $kind in
  mpi) directories=$JAXMPI_MPI_INCLUDE check=check_mpi ;;
  ffi) directories=$JAXMPI_FFI_INCLUDE source=check_ffi.c options=$strict ;;
  cuda) directories=$JAXMPI_CUDA_INCLUDE options="-DDRIVER_HEADER=<cuda.h>" ;;
  hip)
    directories=$JAXMPI_HIP_INCLUDE
    options="-DDRIVER_HIP -D__HIP_PLATFORM_AMD__ -DDRIVER_HEADER=<hip/hip_runtime_api.h>"
    ;;
  nccl) directories=$JAXMPI_NCCL_INCLUDE source=check_nccl.c options="-isystem ${JAXMPI_CUDA_INCLUDE:-/usr/include}" ;;
esac
[ -n "$directories" ] || exit 77
IFS=:
set -f
for directory in $directories; do
  IFS=' '
  "${check:-check}" "$directory" "$@"
done
exit $status
