#!/bin/sh
# Installs a version of Intel's SYCL runtime, and makes a folder in which the tests find it with its CPU device.
# Usage: real_sycl.sh PYTHON VERSION ENVIRONMENT FOLDER CSRC
set -e
python=$1 version=$2 environment=$3 folder=$4 csrc=$5
here=$(dirname "$0")
"$python" -m venv --without-pip "$environment"
"$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check \
  "intel-sycl-rt==$version" "intel-opencl-rt==$version" "intel-cmplr-lib-ur==$version"
rm -rf "$folder"
mkdir -p "$folder"
# What comes with it and may stand in the way of the job's MPI is left out.
for library in "$environment"/lib/lib*.so* "$environment"/lib/cl.cfg; do
  case $library in
    */libmpi* | */libhwloc* | */libfabric*) ;;
    *) ln -s "$(realpath "$library")" "$folder/" ;;
  esac
done
sycl=$(basename "$(ls "$folder"/libsycl.so.? | head -n 1)")
c++ -std=c++17 -O1 -fPIC -shared -w -isystem "$environment/include" -I"$here" "$here/real_sycl.cpp" \
  -o "$folder/libreal_sycl.so" -L"$folder" -l:"$sycl" -Wl,-rpath,"$(realpath "$folder")"
cc -std=gnu11 -O2 -fPIC -shared -fvisibility=hidden -I"$here" -I"$csrc" "$here/bridge.c" -o "$folder/libbridge.so" -ldl -lpthread
# Each function that is used is there, by its name.
names=$(sed -n 's/.*\(_ZN*K*4sycl[A-Za-z0-9_]*\).*/\1/p' "$csrc/devices/sycl.def")
for name in $names; do
  nm -D "$folder/$sycl" | grep -q " T $name\(@.*\)*\$" || { echo "$sycl does not export $name" >&2; exit 1; }
done
[ "$(echo "$names" | wc -l)" -eq 13 ]
