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
build_and_install() { # SOURCE
  cmake -G Ninja -S "$1" -B "$build/of_$(basename "$1")" -DBUILD_TESTING=OFF -DINSTALL_SOURCES=OFF \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE="$flags" -DCMAKE_CXX_FLAGS_RELEASE="$flags" \
    -DCMAKE_INSTALL_PREFIX="$venv" -DPython3_EXECUTABLE="$venv/bin/python3" \
    -DCMAKE_PROJECT_INCLUDE="$root/tools/wheels_fix.cmake" &&
  cmake --build "$build/of_$(basename "$1")" --target install
}

# tf2_msgs, of which the node reads the one message of /tf_static, has no wheel.
tf2="$build/tf2_msgs"
mkdir -p "$tf2/msg"
echo "geometry_msgs/TransformStamped[] transforms" > "$tf2/msg/TFMessage.msg"
cat > "$tf2/package.xml" << 'XML'
<package format="3">
  <name>tf2_msgs</name>
  <version>0.0.0</version>
  <description>The message of /tf and /tf_static.</description>
  <maintainer email="edgellm_ros@users.noreply.github.com">edgellm_ros maintainers</maintainer>
  <license>Apache-2.0</license>
  <buildtool_depend>ament_cmake</buildtool_depend>
  <buildtool_depend>rosidl_default_generators</buildtool_depend>
  <depend>geometry_msgs</depend>
  <member_of_group>rosidl_interface_packages</member_of_group>
  <export><build_type>ament_cmake</build_type></export>
</package>
XML
cat > "$tf2/CMakeLists.txt" << 'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(tf2_msgs)
find_package(ament_cmake REQUIRED)
find_package(rosidl_default_generators REQUIRED)
find_package(geometry_msgs REQUIRED)
rosidl_generate_interfaces(tf2_msgs "msg/TFMessage.msg" DEPENDENCIES geometry_msgs)
ament_package()
CMAKE

if ! { build_and_install "$tf2" && build_and_install "$root"; } > "$build/log" 2>&1; then
  cat "$build/log" >&2
  echo "edgellm_ros: building the interfaces failed, see above" >&2
  exit 1
fi

# Without an __init__.py the generated modules are a portion of the clone's package and do not hide it.
site=$("$venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -f "$site/edgellm_ros/__init__.py"
