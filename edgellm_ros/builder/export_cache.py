# SPDX-License-Identifier: Apache-2.0
"""Exports only when needed: an engine directory keeps the hash of everything it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import edgellm_ros
from edgellm_ros.builder.exporter import export
from edgellm_ros.engine_directory.config import EngineConfig

SOURCE_FILE = "exported_from"
PACKAGE = Path(edgellm_ros.__file__).resolve().parent
ARENA_CHECKPOINT = PACKAGE.parent / "models" / "arena"


def export_if_needed(
    checkpoint_dir: str | Path, engine_dir: str | Path, before_export: Callable[[], None] = lambda: None
) -> EngineConfig:
    """Export a checkpoint with default limits, if needed.

    Nothing is done if the engine directory is complete and up to date. The directory is up to date if neither
    the checkpoint nor the builder's code has changed since its export. `before_export` is called if an export
    is needed. Errors as of `export`.
    """
    checkpoint, engine = Path(checkpoint_dir), Path(engine_dir)
    if not (checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"{checkpoint / 'config.json'} not found: {checkpoint} is not a checkpoint")
    source, stamp = source_hash(checkpoint), engine / SOURCE_FILE
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == source:
        try:
            return EngineConfig.load(engine)
        except (ValueError, FileNotFoundError):
            pass  # damaged since: make it again
    before_export()
    stamp.unlink(missing_ok=True)
    config = export(checkpoint, engine)
    stamp.write_text(source + "\n", encoding="utf-8")
    return config


def source_hash(checkpoint: Path) -> str:
    """Hash everything an exported engine follows from.

    That is the checkpoint's files, the code of the builder and of the engine directory, and the config
    classes. Returns the SHA-256 in hex.
    """
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    code = [
        path
        for folder in ("builder", "engine_directory")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    ]
    code += [PACKAGE / folder / "config.py" for folder in ("diffusion", "multimodal")]
    names = [path.relative_to(checkpoint) for path in files] + [path.relative_to(PACKAGE) for path in code]
    digest = hashlib.sha256()
    for name, path in zip(names, files + code, strict=True):
        digest.update(name.as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
