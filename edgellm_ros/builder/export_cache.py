# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint only if the engine directory is missing or outdated.

The engine directory stores a hash of all inputs of its export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import edgellm_ros
from edgellm_ros.builder.exporter.export import export
from edgellm_ros.engine_directory.config import EngineConfig

SOURCE_FILE = "exported_from"
PACKAGE = Path(edgellm_ros.__file__).resolve().parent
ARENA_CHECKPOINT = PACKAGE.parent / "models" / "arena"


def export_if_needed(
    checkpoint_dir: str | Path,
    engine_dir: str | Path,
    before_export: Callable[[], None] = lambda: None,
    precision: str = "fp32",
) -> EngineConfig:
    """Export a checkpoint unless the engine directory is up to date.

    The export has default limits. A directory is up to date if it is complete and of this precision, and
    neither the checkpoint nor the builder's code has changed since the export. `before_export` is called
    before an export. Raises the errors of `export`.
    """
    checkpoint, engine = Path(checkpoint_dir), Path(engine_dir)
    if not (checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"{checkpoint / 'config.json'} not found: {checkpoint} is not a checkpoint")
    source, stamp = source_hash(checkpoint), engine / SOURCE_FILE
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == source:
        try:
            config = EngineConfig.load(engine)
        except (ValueError, FileNotFoundError):
            pass  # damaged since the export: export again
        else:
            if config.precision == precision:
                return config
    before_export()
    stamp.unlink(missing_ok=True)
    config = export(checkpoint, engine, precision=precision)
    stamp.write_text(source + "\n", encoding="utf-8")
    return config


def source_hash(checkpoint: Path) -> str:
    """Hash all inputs of an export: checkpoint files, builder code and config classes.

    Returns the SHA-256 in hex.
    """
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    code = [
        path
        for folder in ("builder", "engine_directory")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    ]
    configs = ("diffusion/config.py", "multimodal/audio/config.py", "multimodal/vision_config.py")
    code += [PACKAGE / config for config in configs]
    names = [path.relative_to(checkpoint) for path in files] + [path.relative_to(PACKAGE) for path in code]
    digest = hashlib.sha256()
    for name, path in zip(names, files + code, strict=True):
        digest.update(name.as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
