# SPDX-License-Identifier: Apache-2.0
"""The cache folder of compiled files, described in README.md."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgellm_ros" / "emulation"
MOST_BYTES, KEPT_SECONDS = 256 << 20, 3600


def cached(inputs: Sequence[str], suffix: str, compile: Callable[[Path], None]) -> Path:
    """Return the file of these inputs, from the cache folder or made by compile(path).

    inputs: everything that the file depends on.
    """
    folder = cache_folder()
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:32]
    file = folder / f"{key}{suffix}"
    with locked(folder / f"{key[:2]}.lock"):
        try:
            os.utime(file)
        except FileNotFoundError:
            part = folder / f"{key}.{os.getpid()}.part"
            compile(part)
            part.replace(file)
            remove_oldest(folder)
    return file


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let one process at a time look for a file.

    Others wait for the file instead of compiling it too.
    """
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_oldest(folder: Path) -> None:
    """Remove files beyond MOST_BYTES, first those not used for the longest time.

    Files of the last hour stay, as another process may be about to load them. A loaded library works on.
    """
    files = []
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has removed the file
            if file.suffix != ".lock":
                files.append((file.stat().st_mtime, file.stat().st_size, file))
    total = 0
    for time_of_use, size, file in sorted(files, reverse=True):
        total += size
        if total > MOST_BYTES and time.time() - time_of_use > KEPT_SECONDS:
            file.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return the cache folder, or a temporary one if that is not writable."""
    with contextlib.suppress(OSError):
        CACHE.mkdir(parents=True, exist_ok=True)
        if os.access(CACHE, os.W_OK):
            return CACHE
    return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="edgellm_emulation_")
