# SPDX-License-Identifier: Apache-2.0
"""Replaces a file so that a reader sees the old or the new contents, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, contents: bytes | memoryview) -> None:
    """Replace a file, in a folder that exists; OSError leaves the old contents."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(contents)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
