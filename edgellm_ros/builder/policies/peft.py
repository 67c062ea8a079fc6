# SPDX-License-Identifier: Apache-2.0
"""Merges the adapter of a policy that LeRobot trained with PEFT into its base.

Such a folder has `use_peft` in `config.json` and an adapter in place of `model.safetensors`. Configuration
and processors are the folder's own; the base gives weights only.

Source: LeRobot 0.4.4, policies/factory.py and policies/pretrained.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.adapters.adapter_source import CONFIG_FILE
from edgellm_ros.engine_directory.adapters.peft_adapter import read_adapter

BASE = "base"  # folder of a checkpoint: the base of its adapter
PEFT = "use_peft"


def read_weights(checkpoint: Path, config: ConfigSection) -> Weights:
    """Read the weights of a policy, an adapter merged into those of its base.

    ValueError or FileNotFoundError, which names file, key and value, for an adapter that is not plain LoRA,
    and for a base that is missing or of another type.
    """
    if not config.flag(PEFT, default=False):
        if (checkpoint / CONFIG_FILE).is_file():
            raise config.fail(PEFT, f"expected true beside {CONFIG_FILE}")
        return Weights(checkpoint)
    base = _find_base(checkpoint)
    section = read_section(base / "config.json")
    section.one_of("type", [config.text("type")])
    section.one_of(PEFT, [False], default=False)
    weights = Weights(base)
    shapes = {name: tensor.shape for name, tensor in weights.tensors.items() if name.endswith(".weight")}
    targets = {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in shapes.items()
        if len(shape) == 2
    }
    for module, (a, b) in read_adapter(checkpoint, targets, sys.maxsize).weights.items():
        weights.add(f"{module}.weight", b.T, a.T)
    return weights


def _find_base(checkpoint: Path) -> Path:
    """Find the base: the folder `base`, or the one that the adapter names."""
    if (checkpoint / BASE).is_dir():
        return checkpoint / BASE
    adapter = read_section(checkpoint / CONFIG_FILE)
    name = adapter.text("base_model_name_or_path")
    if not name:  # the path "" is the current folder
        raise adapter.fail("base_model_name_or_path", "expected the name of the base")
    if Path(name).is_dir():
        return Path(name)
    raise adapter.fail(
        "base_model_name_or_path",
        f"an adapter needs its base: hf download {name} --local-dir {checkpoint / BASE}",
    )
