#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: tools/check_prerequisites.sh PYTHON
# Print the first missing prerequisite on one line and fail; print nothing if all are present.
set -euo pipefail
python=$1

missing() {
  echo "edgellm_ros: $1" >&2
  exit 1
}

command -v "$python" > /dev/null || missing "$python not found: install Python 3.10 to 3.13, or give PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
  missing "$python is $("$python" -V 2>&1): Python 3.10 to 3.13 is needed, give PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2> /dev/null ||
  missing "$python cannot make virtual environments: install its venv module (Debian, Ubuntu: apt install python3-venv)"
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
  missing "the header Python.h of $python not found: install it (Debian, Ubuntu: apt install python3-dev)"
for compiler in gcc g++; do
  command -v "$compiler" > /dev/null || missing "$compiler not found: install it (Debian, Ubuntu: apt install build-essential)"
done
