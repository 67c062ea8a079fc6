#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: tools/aarch64/prepare.sh VENV FOLDER
# Make FOLDER/python: Python for aarch64 with the packages of requirements.txt, in QEMU's user-mode emulation.
# Everything lies in FOLDER: nothing is installed, no root is needed, and the computer's apt is not changed.
set -euo pipefail
venv=$(realpath "$1")
folder=$2
requirements=$(dirname "$(realpath "$0")")/../..

fail() {
  echo "edgellm_ros: $1" >&2
  exit 1
}

[ "$(uname -m)" = x86_64 ] || fail "make test-aarch64 emulates aarch64 on x86_64, and this computer is $(uname -m)"
for tool in apt-get dpkg; do
  command -v $tool > /dev/null || fail "$tool not found: it gets Python for aarch64, so make test-aarch64 needs Debian"
done
rm -rf "$folder"
mkdir -p "$folder"
folder=$(realpath "$folder")

# Unpack packages of ARCHITECTURE and all that they depend on. The lists of packages and an empty list of
# installed ones are FOLDER's own: so apt knows no other architecture, and takes no package as given.
unpack() { # ARCHITECTURE DESTINATION PACKAGE...
  local architecture=$1 destination=$2 apt=$folder/apt/$1
  shift 2
  mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$destination"
  local options=(-qq -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" -o APT::Sandbox::User=
    -o Dir::State="$apt" -o Dir::State::lists="$apt/lists" -o Dir::State::status=/dev/null
    -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" -o Acquire::Languages=none)
  { apt-get "${options[@]}" update &&
    apt-get "${options[@]}" install --download-only --yes --no-install-recommends "$@"; } > "$apt/log" 2>&1 || {
    cat "$apt/log" >&2
    fail "apt-get: $* of $architecture not found, see above"
  }
  local package
  for package in "$apt"/archives/*.deb; do
    dpkg -x "$package" "$destination"
  done
}

root=$folder/root
unpack arm64 "$root" python3 libgomp1 libstdc++6
[ -e "$root/lib" ] || ln -s usr/lib "$root/lib" # Debian 13 has the loader in /usr/lib
find_emulator() { command -v qemu-aarch64 || command -v qemu-aarch64-static; }
emulator=$(find_emulator) || {
  unpack amd64 "$folder/emulators" qemu-user-static
  emulator=$folder/qemu-aarch64
  mv "$(PATH=$folder/emulators/usr/bin find_emulator)" "$emulator"
  rm -rf "$folder/emulators" # of 40 processors
}
rm -rf "$folder/apt"

# ONNX Runtime reads the processor's features here, and ends in a segmentation fault with those of x86. These are
# a Neoverse N1's, which has the instructions of Orin's Cortex-A78AE.
mkdir -p "$root/proc" "$root/sys/devices/system/cpu"
last=$(($(nproc) - 1))
for core in $(seq 0 "$last"); do
  cat << CORE
processor	: $core
BogoMIPS	: 50.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1

CORE
done > "$root/proc/cpuinfo"
for list in possible present online; do
  echo "0-$last" > "$root/sys/devices/system/cpu/$list"
done

# Markers such as python_version are those of VENV's Python, for pip evaluates them for the Python that it runs in.
interpreter=$(readlink "$root/usr/bin/python3")
platforms=(--platform manylinux2014_aarch64)
for version in 17 24 26 27 28 31 34 35 36; do
  platforms+=(--platform "manylinux_2_${version}_aarch64")
done
mapfile -t tests < <(grep -E '^(pytest|pytest-timeout|jsonschema|gguf)==' "$requirements/requirements-test.txt")
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --target "$folder/site" --only-binary=:all: \
  --implementation cp --python-version "${interpreter#python}" "${platforms[@]}" \
  -r "$requirements/requirements.txt" "${tests[@]}"

cat > "$folder/python" << PYTHON
#!/bin/sh
export QEMU_CPU="\${QEMU_CPU:-neoverse-n1}" PYTHONPATH="$folder/site" PYTHONNOUSERSITE=1
unset PYTHONHOME
exec "$emulator" -L "$root" "$root/usr/bin/$interpreter" "\$@"
PYTHON
chmod +x "$folder/python"
machine=$("$folder/python" -c 'import onnxruntime, platform; print(platform.machine())') ||
  fail "$emulator cannot run Python for aarch64, see above"
[ "$machine" = aarch64 ] || fail "$folder/python runs on $machine in place of aarch64"
