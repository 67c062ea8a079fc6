# SPDX-License-Identifier: Apache-2.0
"""The folder of what can be made again: compiled kernels, engines of GGUF files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder of a kind of files, which need not exist.

    The folder is ~/.cache/edgellm_ros/NAME, or below XDG_CACHE_HOME. Without a home directory, the folder is
    below the one for temporary files. Source: XDG base directory specification.
    """
    home = Path(os.path.expanduser("~"))  # stays "~" without a home directory
    cache = os.environ.get("XDG_CACHE_HOME") or (
        home / ".cache" if home.is_absolute() else tempfile.gettempdir()
    )
    return Path(cache) / "edgellm_ros" / name
