# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in an engine directory: their folder and their names."""

from __future__ import annotations

import re
from pathlib import Path

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.adapters.adapter_source import is_adapter

FOLDER = "lora"  # of an engine directory: one folder or file per adapter
BASE = "base"  # name of the base model, even if an adapter is active; no adapter may have it
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def canonical_name(name: str) -> str:
    """Return the name under which an adapter is stored and reported.

    BASE becomes "", the base model.
    """
    return "" if name == BASE else name


def check_name(name: str) -> None:
    """Raise ValueError for an invalid adapter name."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"an adapter's name must consist of letters, digits, '_', '.' and '-', got {quoted(name)}"
        )
    if name == BASE:
        raise ValueError(f"{BASE!r} is the name of the base model: an adapter needs another name")


def find_adapters(engine_dir: str | Path) -> dict[str, Path]:
    """List the adapters of an engine directory or a checkpoint.

    Name -> directory or file, sorted. ValueError for a directory and a file of one name.
    """
    folder = Path(engine_dir) / FOLDER
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or not is_adapter(path):
            continue
        name = path.name if path.is_dir() else path.stem
        if name in found:
            raise ValueError(f"{path}: {found[name]} is an adapter of this name too")
        found[name] = path
    return dict(sorted(found.items()))


def find_adapter(engine_dir: str | Path, name: str, key: str = "--lora") -> Path | None:
    """Find an adapter by name; None for the base model ("" or BASE).

    ValueError for an unknown name; the error lists the known names. key: what has the name, for the error.
    """
    if not canonical_name(name):
        return None
    found = find_adapters(engine_dir)
    if name not in found:
        raise ValueError(
            f"{key} {quoted(name)}: no such adapter in {Path(engine_dir) / FOLDER}, which has "
            f"{', '.join(found) or 'none'}"
        )
    return found[name]
