# SPDX-License-Identifier: Apache-2.0
"""TimeEmbedding: what an action expert adds for the time of an Euler step.

The expert's first layer adds the embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TimeEmbedding:
    """The embedding of times on the host.

    The embedding is sines and cosines, and two linear layers with SiLU between them.

    Weights are float32 [fan_in, fan_out]. `second_bias` may have what else does not depend on the trajectory.
    Source of the features: `builder/action/action_layers.py`.
    """

    min_period: float
    max_period: float
    first: np.ndarray
    first_bias: np.ndarray
    second: np.ndarray
    second_bias: np.ndarray

    def rows(self, steps: int) -> np.ndarray:
        """Return the rows [steps,H] float32 of `steps` Euler steps from time 0 to 1."""
        return self.at((np.arange(steps) / steps).astype(np.float32))

    def at(self, times: np.ndarray) -> np.ndarray:
        """Return the rows [N,H] float32 of times [N] float32."""
        low, high, count = self.min_period, self.max_period, len(self.first) // 2
        periods = low * (high / low) ** np.linspace(0.0, 1.0, count)
        angles = times[:, None] * (2 * math.pi / periods).astype(np.float32)
        raised = np.concatenate([np.sin(angles), np.cos(angles)], axis=1) @ self.first + self.first_bias
        return raised / (1 + np.exp(-raised)) @ self.second + self.second_bias
