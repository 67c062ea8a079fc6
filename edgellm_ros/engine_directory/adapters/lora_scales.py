# SPDX-License-Identifier: Apache-2.0
"""Factors of LoRA adapters for an engine whose layers have scaled inputs.

Adapters are made for layers y = W x. A calibrated engine has layers with inputs x / s and outputs c y, whose
weights contain the factors (`builder/calibration/folding.py`). With A and B of an adapter it computes the
same as without scales if A becomes diag(s) A and B becomes B diag(c).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from edgellm_ros.engine_directory.adapters.peft_adapter import PeftAdapter

LORA_SCALES_FILE = "lora_scales.safetensors"
INPUTS, OUTPUTS = ".inputs", ".outputs"


@dataclass(frozen=True, eq=False)
class LoraScales:
    """Factors by engine module, fp32.

    A module is for example "model.layers.0.mlp.up_proj"; one without factors has 1.
    """

    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # s [K]
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # c [N]

    @classmethod
    def read(cls, engine_dir: Path) -> LoraScales:
        """Read the factors of an engine directory; there are none without the file."""
        path = engine_dir / LORA_SCALES_FILE
        if not path.is_file():
            return cls()
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
        found = (
            {name.removesuffix(end): values for name, values in tensors.items() if name.endswith(end)}
            for end in (INPUTS, OUTPUTS)
        )
        return cls(*found)

    def contents(self) -> bytes:
        tensors = {f"{module}{INPUTS}": values for module, values in self.inputs.items()}
        tensors |= {f"{module}{OUTPUTS}": values for module, values in self.outputs.items()}
        return save({name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()})

    def apply(self, adapter: PeftAdapter) -> PeftAdapter:
        """Return an adapter with the factors."""
        weights = {}
        for module, (a, b) in adapter.weights.items():
            if module in self.inputs:
                a = a * self.inputs[module][:, None]
            if module in self.outputs:
                b = b * self.outputs[module]
            weights[module] = a, b
        return PeftAdapter(adapter.rank, weights)
