# SPDX-License-Identifier: Apache-2.0
"""The parameter `loras`: adapters to load, as NAME=DIR, at start and while the node runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgellm_ros.echo import printable, quoted
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


def parse_loras(values: Sequence[str]) -> dict[str, Path]:
    """Return directories by adapter name. Empty strings are skipped, as ROS has no empty list."""
    directories: dict[str, Path] = {}
    for value in filter(None, values):
        name, equals, directory = value.partition("=")
        if not (name and equals and directory):
            raise ValueError(f"loras must be strings NAME=DIR, got {quoted(value)}")
        if name in directories:
            raise ValueError(f"loras names {quoted(name)} twice")
        directories[name] = Path(directory)
    return directories


def change_loras(runtime: LLMInferenceRuntime, before: Mapping[str, Path], after: Mapping[str, Path]) -> None:
    """Load the adapters that are new in `after` and remove those that are only in `before`.

    All or nothing: after an error (OSError, ValueError) the loaded adapters are those from before.
    """
    moved = [name for name in after if name in before and after[name] != before[name]]
    if moved:
        raise ValueError(
            f"adapter {quoted(moved[0])} is loaded from {printable(str(before[moved[0]]))}: remove it first"
        )
    gone = [name for name in before if name not in after]
    if runtime.active_lora in gone:
        raise ValueError(
            f"adapter {quoted(runtime.active_lora)} is active: switch to another before it is removed"
        )
    added: list[str] = []
    try:
        for name, directory in after.items():
            if name not in before:
                runtime.add_lora(name, directory)
                added.append(name)
        runtime.remove_lora(*gone)
    except (OSError, ValueError):
        runtime.remove_lora(*added)
        raise
