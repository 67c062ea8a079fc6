# SPDX-License-Identifier: Apache-2.0
"""TimeEmbedding: what the first layer of an action expert adds for the time of an Euler step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from edgellm_ros.engine_directory.fused_expert import FusedExpertModel
from edgellm_ros.engine_directory.fused_model import StoredWeight


class TimeEmbedding:
    """The embedding of times on the host, with the input projection's bias.

    Source of the features: `builder/flow_expert.py`.
    """

    def __init__(self, folder: Path, model: FusedExpertModel, dtype: np.dtype) -> None:
        contents = np.memmap(folder / model.file, np.uint8, "r")

        def read(weight: StoredWeight) -> np.ndarray:
            raw = contents[weight.offset : weight.offset + weight.size * dtype.itemsize]
            return raw.view(dtype).reshape(weight.shape).astype(np.float32)

        time = model.time
        self._first, self._first_bias = read(time.first), read(time.first_bias)
        self._second, self._bias = read(time.second), read(time.second_bias) + read(model.in_bias)
        low, high, count = time.min_period, time.max_period, len(self._first) // 2
        periods = low * (high / low) ** np.linspace(0.0, 1.0, count)
        self._frequency = (2 * math.pi / periods).astype(np.float32)

    def rows(self, steps: int) -> np.ndarray:
        """Return the rows [steps,H] float32 of so many Euler steps from time 0 to 1."""
        times = (np.arange(steps) / steps).astype(np.float32)
        angles = times[:, None] * self._frequency
        raised = np.concatenate([np.sin(angles), np.cos(angles)], axis=1) @ self._first + self._first_bias
        return raised / (1 + np.exp(-raised)) @ self._second + self._bias
