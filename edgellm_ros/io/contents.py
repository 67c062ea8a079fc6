# SPDX-License-Identifier: Apache-2.0
"""Contents of files, and codecs whose messages are not shown."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def contents(source: str | Path | bytes) -> tuple[bytes, str]:
    """Return a file's contents, and its name as the beginning of errors.

    Contents that are given have no name.
    """
    return (source, "") if isinstance(source, bytes) else (read_bytes(source), f"{source}: ")


def read_bytes(path: str | Path) -> bytes:
    """Return the contents of a file.

    Raise an error that names the path if it is not a file.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path}: is a directory, expected a file")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return Path(path).read_bytes()


@contextlib.contextmanager
def silenced_stderr() -> Iterator[None]:
    """Discard what image codecs write to file descriptor 2.

    Our error is the one line that names the file.
    """
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
