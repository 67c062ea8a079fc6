# SPDX-License-Identifier: Apache-2.0
"""Checks and copies the LoRA adapters in the folder `lora` of a checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgellm_ros.engine_directory.adapter_folder import FOLDER, check_name
from edgellm_ros.engine_directory.lora_inputs import lora_inputs, lora_targets
from edgellm_ros.engine_directory.peft_adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftAdapter,
    read_peft_adapter,
)

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)


def read_adapters(
    adapters: Mapping[str, Path], inputs: Mapping[str, Sequence[Any]], max_rank: int | None
) -> dict[str, PeftAdapter]:
    """Read adapters for a language model.

    adapters: name -> directory; inputs: name of each graph input -> shape; max_rank: None for any rank.
    Raises the errors of `read_peft_adapter`, and ValueError for an invalid adapter name.
    """
    for name in adapters:
        check_name(name)
    targets = lora_targets(lora_inputs(inputs))
    return {
        name: read_peft_adapter(path, targets, max_rank or sys.maxsize) for name, path in adapters.items()
    }


def copy_adapters(adapters: Mapping[str, Path], engine: Path) -> None:
    """Copy adapters to the engine directory, replacing adapters of the same names."""
    for name, path in adapters.items():
        target = engine / FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in ADAPTER_FILES:
            shutil.copyfile(path / file, target / file)
