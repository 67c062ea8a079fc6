# SPDX-License-Identifier: Apache-2.0
"""Checks and copies the LoRA adapters in the folder `lora` of a checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgellm_ros.engine_directory.adapters.adapter_folder import FOLDER, check_name
from edgellm_ros.engine_directory.adapters.adapter_source import ENDING, find_source
from edgellm_ros.engine_directory.adapters.lora_inputs import lora_inputs, lora_targets
from edgellm_ros.engine_directory.adapters.peft_adapter import PeftAdapter, read_adapter


def read_adapters(
    adapters: Mapping[str, Path], inputs: Mapping[str, Sequence[Any]], max_rank: int | None
) -> dict[str, PeftAdapter]:
    """Read adapters for a language model.

    adapters: name -> directory or file; inputs: name of each graph input -> shape; max_rank: None for any
    rank. Raises the errors of `read_adapter`, and ValueError for an invalid adapter name.
    """
    for name in adapters:
        check_name(name)
    targets = lora_targets(lora_inputs(inputs))
    return {name: read_adapter(path, targets, max_rank or sys.maxsize) for name, path in adapters.items()}


def copy_adapters(adapters: Mapping[str, Path], engine: Path) -> None:
    """Copy adapters to the engine directory, replacing adapters of the same names."""
    for name, path in adapters.items():
        target = engine / FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.with_name(f"{name}{ENDING}").unlink(missing_ok=True)
        for file, source in copied_files(name, path).items():
            (engine / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, engine / file)


def copied_files(name: str, path: Path) -> dict[str, Path]:
    """List the files that a copied adapter has: path in the engine directory -> file.

    A file with its configuration beside it becomes a directory.
    """
    source = find_source(path)
    if source.config is None:
        return {f"{FOLDER}/{name}{ENDING}": source.weights}
    return {f"{FOLDER}/{name}/{file}": each for file, each in source.files.items()}
