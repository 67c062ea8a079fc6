# SPDX-License-Identifier: Apache-2.0
"""The files that `config.json` of an engine directory lists, and their checks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SPECIAL_TOKENS_FILE = "special_tokens_map.json"  # variables of the chat template: bos_token, eos_token, ...

PREFIX = "prefix"  # the graph of a policy's context
VERIFY, DRAFT = "llm/verify", "draft"  # graphs for drafting: hybrids have the first, draft heads both
CONTEXT = "draft/context"  # of block drafters: from the base's states to rows of the KV cache
MODULATION = "action/modulation"  # of a policy on CUDA: from times to what its action engine takes of them
CHAIN = "chain"  # form of their graphs for CUDA: `llm/verify.chain.cuda.onnx`
D2T_FILE = "draft/d2t.safetensors"
DRAFT_EMBEDDING_FILE = "draft/embedding.safetensors"


def graph_path(name: str) -> str:
    """Return the path of a graph.

    The path is `<name>.onnx` for the second graph of a folder, else `<name>/model.onnx`.
    """
    return f"{name}.onnx" if name in (VERIFY, CONTEXT, MODULATION) else f"{name}/model.onnx"


@dataclass(frozen=True)
class FileEntry:
    """One file of the engine directory."""

    path: str  # relative to the engine directory, with forward slashes
    size: int  # bytes
    sha256: str  # in hex

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ValueError(f"path must stay inside the engine directory, got {self.path!r}")


def list_files(engine_dir: str | Path, paths: Iterable[str | Path]) -> tuple[FileEntry, ...]:
    """Make entries for files of the engine directory, given relative to it.

    Sorted by path.
    """
    entries = []
    for relative in sorted(PurePosixPath(path).as_posix() for path in paths):
        path = Path(engine_dir) / relative
        entries.append(FileEntry(relative, path.stat().st_size, sha256(path)))
    return tuple(entries)


def check_files(engine_dir: str | Path, files: Iterable[FileEntry], verify: bool = False) -> None:
    """Check that files exist and have their sizes, with `verify` also their SHA-256.

    FileNotFoundError or ValueError for the first file that fails.
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
        if verify and sha256(path) != entry.sha256:
            raise ValueError(f"{path} has another SHA-256 than at its export: damaged or changed")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
