#!/bin/sh
# Compiles check_mpi.c or check_ffi.c against real headers: check_headers.sh mpi|ffi CSRC COMPILER...
#
# JAXMPI_MPI_INCLUDE: directories with an mpi.h, and perhaps an mpi_abi.h beside it, separated by colons.
# JAXMPI_FFI_INCLUDE: likewise those that hold xla/ffi/api/c_api.h; python -c "import jax.ffi; print(jax.ffi.include_dir())"
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
      -DMPI_HEADER="<$header>" -DABI_HEADER="\"abi/$abi.h\"" "$here/check_mpi.c"
  done
}

check_ffi() { # directory, compiler...
  directory=$1
  shift
  compile "$directory" "$@" $strict -I"$csrc" -isystem "$directory" "$here/check_ffi.c"
}

case $kind in
  mpi) directories=$JAXMPI_MPI_INCLUDE ;;
  ffi) directories=$JAXMPI_FFI_INCLUDE ;;
esac
[ -n "$directories" ] || exit 77
IFS=:
set -f
for directory in $directories; do
  IFS=' '
  "check_$kind" "$directory" "$@"
done
exit $status
