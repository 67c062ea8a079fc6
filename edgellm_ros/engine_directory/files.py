# SPDX-License-Identifier: Apache-2.0
"""The files of an engine directory, as `config.json` lists them, and whether they are whole and unaltered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SPECIAL_TOKENS_FILE = "special_tokens_map.json"  # variables of the chat template: bos_token, eos_token, ...


@dataclass(frozen=True)
class FileEntry:
    """One file of the engine directory.

    `path` is relative to it, with forward slashes; `size` in bytes; `sha256` in hex.
    """

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ValueError(f"path must stay inside the engine directory, got {self.path!r}")


def list_files(engine_dir: str | Path, paths: Iterable[str | Path]) -> tuple[FileEntry, ...]:
    """Entries for files of the engine directory, given relative to it, sorted by path."""
    entries = []
    for relative in sorted(PurePosixPath(path).as_posix() for path in paths):
        path = Path(engine_dir) / relative
        entries.append(FileEntry(relative, path.stat().st_size, _sha256(path)))
    return tuple(entries)


def check_files(engine_dir: str | Path, files: Iterable[FileEntry], verify: bool = False) -> None:
    """Check that files are there in full, and with `verify` that they are unaltered.

    FileNotFoundError or ValueError for the first that is not.
    """
    for entry in files:
        path = Path(engine_dir) / entry.path
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the engine directory is incomplete, export it again")
        size = path.stat().st_size
        if size != entry.size:
            raise ValueError(
                f"{path} has {size} bytes, expected {entry.size}: damaged or cut short, export again"
            )
        if verify and _sha256(path) != entry.sha256:
            raise ValueError(f"{path} has another SHA-256 than when it was exported: damaged or altered")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
