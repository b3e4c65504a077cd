#!/bin/sh
# Makes a folder in which JAX's plugin for Intel's devices finds what it needs on a machine without their driver: the
# libraries of its environment, and loaders of Level Zero in which every function fails. Then XLA compiles for a device.
# Usage: stub_level_zero.sh ENVIRONMENT FOLDER
set -e
environment=$1 folder=$2
rm -rf "$folder"
mkdir -p "$folder"
# The job's MPI stands for that of the plugin, which has the same ABI.
for library in "$environment"/lib/lib*.so*; do
  case $library in
    */libmpi* | */libhwloc* | */libfabric*) ;;
    *) ln -s "$(realpath "$library")" "$folder/" ;;
  esac
done
plugin=$(ls "$environment"/lib/python3*/site-packages/jax_plugins/xla_oneapi/xla_oneapi_plugin.so)
# ZE_RESULT_ERROR_UNINITIALIZED
nm -D --undefined-only "$plugin" "$folder"/libur_adapter_level_zero.so.0 |
  sed -n 's/.* U \(z[a-z]*[A-Z][A-Za-z0-9]*\).*/int \1(void) { return 0x78000001; }/p' | sort -u >"$folder/stub.c"
for name in libze_loader.so.1 libze_tracing_layer.so.1; do
  cc -shared -fPIC -w -o "$folder/$name" -Wl,-soname,"$name" "$folder/stub.c"
done
