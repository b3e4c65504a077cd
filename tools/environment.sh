#!/bin/sh
# A new virtual environment: environment.sh PYTHON FOLDER. Says what the machine lacks for that.
python=$1 folder=$2

$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "jaxmpi needs Python 3.10 or newer, $python is $($python --version): make PYTHON=python3.12 ..."
  exit 1
}
test -f "$($python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || {
  echo "The headers of Python are missing; on Debian and Ubuntu: apt install python3-dev"
  exit 1
}
# A new pip by that of Python is there sooner than the one that venv unpacks.
$python -m venv --without-pip "$folder" 2>/dev/null &&
  $python -m pip --python "$folder/bin/python" install --quiet --disable-pip-version-check --no-compile pip 2>/dev/null ||
  $python -m venv "$folder" || {
  rm -rf "$folder"
  echo "Python's venv is missing; on Debian and Ubuntu: apt install python3-venv"
  exit 1
}
