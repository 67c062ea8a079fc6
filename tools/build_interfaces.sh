#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: tools/build_interfaces.sh VENV
# Build the messages, services and actions of this package with the ROS wheels in VENV and install them into VENV.
# The Python code stays in the clone: VENV imports it from there (see edgellm_ros/__init__.py).
set -euo pipefail
venv=$(realpath "$1")
root=$(dirname "$(dirname "$(realpath "$0")")")
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

export PATH="$venv/bin:$PATH" AMENT_PREFIX_PATH="$venv" CMAKE_PREFIX_PATH="$venv"
unset PYTHONPATH
# Messages are as fast as with -O3, which takes the compiler twice as long.
flags="-O1 -DNDEBUG"
if ! {
  cmake -G Ninja -S "$root" -B "$build" -DBUILD_TESTING=OFF -DINSTALL_SOURCES=OFF \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE="$flags" -DCMAKE_CXX_FLAGS_RELEASE="$flags" \
    -DCMAKE_INSTALL_PREFIX="$venv" -DPython3_EXECUTABLE="$venv/bin/python3" \
    -DCMAKE_PROJECT_INCLUDE="$root/tools/wheels_fix.cmake" &&
  cmake --build "$build" --target install
} > "$build/log" 2>&1; then
  cat "$build/log" >&2
  echo "edgellm_ros: building the interfaces failed, see above" >&2
  exit 1
fi

# Without an __init__.py the generated modules are a portion of the clone's package and do not hide it.
site=$("$venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -f "$site/edgellm_ros/__init__.py"
