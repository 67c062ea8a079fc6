# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of an engine directory: their folder and names, and the inputs that they are bound to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = "lora"  # of an engine directory: one folder per adapter
BASE = "base"  # names the base model, also while an adapter is active; no adapter has this name
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
INPUT = re.compile(r"(.+)\.lora_([AB])\.weight")


def canonical_name(name: str) -> str:
    """The name under which an adapter is kept and reported: "" for the base model, which BASE names too."""
    return "" if name == BASE else name


def check_name(name: str) -> None:
    """ValueError for a name that an adapter cannot have."""
    if not NAME.fullmatch(name):
        raise ValueError(f"the name of an adapter is made of letters, digits, '_', '.' and '-', got {name!r}")
    if name == BASE:
        raise ValueError(f"{BASE!r} is the name of the base model, an adapter needs another")


def find_adapters(engine_dir: str | Path) -> dict[str, Path]:
    """Name -> directory of the adapters that lie in an engine directory, sorted."""
    folder = Path(engine_dir) / FOLDER
    if not folder.is_dir():
        return {}
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_dir() and not path.name.startswith(".")
    }


def find_adapter(engine_dir: str | Path, name: str) -> Path | None:
    """The directory of one of them; None for the base model ("" or BASE). ValueError, with the names there
    are.
    """
    if not canonical_name(name):
        return None
    found = find_adapters(engine_dir)
    if name not in found:
        raise ValueError(
            f"--lora {name!r}: no such adapter in {Path(engine_dir) / FOLDER}, which has "
            f"{', '.join(found) or 'none'}"
        )
    return found[name]


def adapter_targets(inputs: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """Modules with a place for an adapter and their sizes (K, N), from the shapes of an engine's inputs."""
    targets = {}
    for name, shape in inputs.items():
        match = INPUT.fullmatch(name)
        if match and match[2] == "A":
            targets[match[1]] = (int(shape[0]), int(inputs[f"{match[1]}.lora_B.weight"][1]))
    return targets
