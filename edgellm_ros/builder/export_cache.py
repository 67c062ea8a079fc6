# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint only if the engine directory is missing or outdated.

The engine directory stores a hash of all inputs of its export.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edgellm_ros
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.gguf.checkpoint import find_gguf, find_tower
from edgellm_ros.builder.gguf.reader import parts
from edgellm_ros.cache_folder import cache_folder
from edgellm_ros.diffusion.openpi_config import OpenPiConfig
from edgellm_ros.engine_directory.config import CONFIG_FILE, EngineConfig
from edgellm_ros.engine_directory.schema import read_json

SOURCE_FILE = "exported_from"
PACKAGE = Path(edgellm_ros.__file__).resolve().parent
ARENA_CHECKPOINT = PACKAGE.parent / "models" / "arena"


def export_if_needed(
    checkpoint_dir: str | Path,
    engine_dir: str | Path,
    before_export: Callable[[], None] = lambda: None,
    **options: Any,
) -> EngineConfig:
    """Export a checkpoint or GGUF file unless the engine directory is up to date.

    A directory is up to date if it is complete, and neither the checkpoint nor the options nor the builder's
    code has changed since the export. `before_export` is called before an export. options: fields of
    `ExportOptions`. Raises the errors of `export`; ValueError for a directory made by `edgellm
    connect-policy`, which an export would replace.
    """
    checkpoint, engine, chosen = Path(checkpoint_dir), Path(engine_dir), ExportOptions(**options)
    if find_gguf(checkpoint) is None and not (checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"{checkpoint / 'config.json'} not found: {checkpoint} is not a checkpoint")
    source, stamp = source_hash(checkpoint, chosen), engine / SOURCE_FILE
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == source:
        try:
            config = EngineConfig.load(engine)
        except (ValueError, FileNotFoundError):
            pass  # damaged since the export: export again
        else:
            if config.precision == chosen.precision:
                return config
    _check_is_no_connection(engine)
    before_export()
    stamp.unlink(missing_ok=True)
    from edgellm_ros.builder.exporter.export import export  # takes a second

    config = export(checkpoint, engine, chosen)
    stamp.write_text(source + "\n", encoding="utf-8")
    return config


def _check_is_no_connection(engine: Path) -> None:
    """Raise ValueError for the directory of a policy on another computer.

    No export can write such a directory again.
    """
    try:
        action = read_json(engine / CONFIG_FILE).get("action")
    except (ValueError, OSError):
        return
    if isinstance(action, dict) and action.get("kind") == OpenPiConfig.kind:
        raise ValueError(
            f"{engine}: made by `edgellm connect-policy`, it asks a policy on another computer; the export "
            "of another engine would replace it: name another directory"
        )


def export_to_cache(gguf: Path, before_export: Callable[[Path], None], **options: Any) -> Path:
    """Export a GGUF file to a folder of the cache, if needed; return the folder.

    The folder follows from the file's path and the options. Of several processes one exports, and the others
    wait. `before_export` is called with the folder. Raises the errors of `export`.
    """
    key = hashlib.sha256(f"{gguf.resolve()}\n{ExportOptions(**options)}".encode()).hexdigest()[:12]
    engine = cache_folder("engines") / f"{gguf.stem}-{key}"
    engine.parent.mkdir(parents=True, exist_ok=True)

    def replace() -> None:
        before_export(engine)
        # A process may still run the old engine: its files are removed, and not written over.
        shutil.rmtree(engine, ignore_errors=True)

    with (engine.parent / f".{engine.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        export_if_needed(gguf, engine, replace, **options)
    return engine


def source_hash(checkpoint: Path, options: ExportOptions) -> str:
    """Hash all inputs of an export: checkpoint, options, builder code, config classes.

    Of a GGUF file, path, size and time of change stand for the contents, which may be many GB. Returns the
    SHA-256 in hex.
    """
    digest = hashlib.sha256(repr(options).encode())
    code = [
        path
        for folder in ("builder", "engine_directory")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    ]
    configs = ("diffusion/config.py", "multimodal/audio/config.py", "multimodal/vision_config.py")
    read = [(path, path.relative_to(PACKAGE)) for path in (*code, *(PACKAGE / config for config in configs))]
    gguf = find_gguf(checkpoint)
    if gguf is None:
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
        read += [(path, path.relative_to(checkpoint)) for path in files]
    else:
        tower = options.mmproj or find_tower(gguf)
        for part in (*parts(gguf), *([] if tower is None else [Path(tower)])):
            stat = part.stat()
            digest.update(f"{part.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n".encode())
    for path, name in read:
        digest.update(name.as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
