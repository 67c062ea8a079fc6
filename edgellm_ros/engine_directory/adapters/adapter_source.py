# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a LoRA adapter: a directory or one `.safetensors` file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from edgellm_ros.engine_directory.adapters.peft_config import LoraConfig
from edgellm_ros.strict_json import parse_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ENDING = ".safetensors"
PREFIX = "base_model.model."  # of PEFT's names of tensors
METADATA = "lora_adapter_metadata"  # of a file's header: the keys of CONFIG_FILE as JSON


@dataclass(frozen=True)
class AdapterSource:
    """The files of an adapter, which need not exist."""

    weights: Path
    config: Path | None  # None: in the header of `weights`, or not needed

    @property
    def files(self) -> dict[str, Path]:
        """Return the files by their names in an adapter's directory."""
        config = {} if self.config is None else {CONFIG_FILE: self.config}
        return {**config, WEIGHTS_FILE: self.weights}


def is_adapter(path: Path) -> bool:
    """Tell whether a path may be an adapter: a directory, or a file with the ending."""
    return path.is_dir() or (path.suffix == ENDING and path.is_file())


def find_source(path: Path) -> AdapterSource:
    """Find the files of the adapter at a path.

    The configuration of a file is in its header, or else in `adapter_config.json` beside it; converted files,
    whose tensors do not begin with PREFIX, need none. FileNotFoundError if the path is neither a directory
    nor a file with the ending.
    """
    if path.is_dir():
        return AdapterSource(path / WEIGHTS_FILE, path / CONFIG_FILE)
    if not is_adapter(path):
        raise FileNotFoundError(
            f"{path}: expected the directory of a PEFT adapter ({CONFIG_FILE}) or a {ENDING} file, found none"
        )
    beside, (names, metadata) = path.with_name(CONFIG_FILE), _header(path)
    needed = METADATA not in metadata and any(name.startswith(PREFIX) for name in names)
    return AdapterSource(path, beside if needed and beside.is_file() else None)


def header_config(path: Path) -> LoraConfig:
    """Read the configuration in the header of an adapter's file.

    ValueError, which says how to give one, if the header has none.
    """
    _, metadata = _header(path)
    text = metadata.get(METADATA)
    if text is None:
        raise ValueError(
            f"{path}: rank and alpha are missing: expected {CONFIG_FILE} of PEFT beside the file, or its "
            f"keys as JSON under {METADATA} in the metadata of the file's header"
        )
    where = f"{path}: {METADATA}"
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, got {type(data).__name__}")
    return LoraConfig.of(where, {"peft_type": "LORA", **data})


def _header(path: Path) -> tuple[list[str], dict[str, str]]:
    """Read the names of a file's tensors, and the metadata."""
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys()), file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged or cut short: {error}") from None
