# SPDX-License-Identifier: Apache-2.0
"""The value of the parameter `loras`, and the change from one value to another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.echo import printable, quoted
from edgellm_ros.engine_directory.adapters.adapter_folder import check_name
from edgellm_ros.engine_directory.adapters.adapter_source import is_adapter

if TYPE_CHECKING:
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


def parse_loras(values: Sequence[str]) -> dict[str, Path]:
    """Return the directory or file of each adapter by name.

    Empty strings are ignored: ROS has no empty list. ValueError for strings of another form.
    """
    directories: dict[str, Path] = {}
    for value in filter(None, values):
        name, equals, directory = value.partition("=")
        if not (name and equals and directory):
            raise ValueError(f"loras must be strings NAME=DIR, got {quoted(value)}")
        if name in directories:
            raise ValueError(f"loras names {quoted(name)} twice")
        directories[name] = Path(directory)
    return directories


def check_change(
    before: Mapping[str, Path], after: Mapping[str, Path], built_in: Collection[str], active: str
) -> None:
    """Raise ValueError for a change that cannot succeed. Reads no file of an adapter.

    `built_in`: adapters of the engine directory; `active`: the active adapter.
    """
    for name, directory in after.items():
        if name not in before:
            check_name(name)
            if name in built_in:
                raise ValueError(
                    f"adapter {quoted(name)} is in the engine directory already: choose another name"
                )
            if not is_adapter(directory):
                raise ValueError(
                    f"{printable(str(directory))} is neither the directory of a PEFT adapter nor a "
                    ".safetensors file"
                )
        elif directory != before[name]:
            raise ValueError(
                f"adapter {quoted(name)} is loaded from {printable(str(before[name]))}: remove it first"
            )
    if active in before and active not in after:
        raise ValueError(f"adapter {quoted(active)} is active: switch to another before it is removed")


def change_loras(runtime: LLMInferenceRuntime, before: Mapping[str, Path], after: Mapping[str, Path]) -> None:
    """Load the adapters that are only in `after`, and remove those only in `before`.

    All or nothing: after an error the loaded adapters are as before. OSError, ValueError or EngineError says
    which adapter failed and why.
    """
    removed = [name for name in before if name not in after]
    added: list[str] = []
    try:
        for name, directory in after.items():
            if name not in before:
                runtime.add_lora(name, directory)
                added.append(name)
        runtime.remove_lora(*removed)
    except Exception:
        runtime.remove_lora(*added)
        raise
