# SPDX-License-Identifier: Apache-2.0
"""A device with its kernels: what tests of kernels put tensors on and read them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from on_device import put

from edgellm_ros.engine.device import CpuDevice, Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels, SamplingState, load_kernels

SAMPLING = {  # name: value that changes nothing, type
    "temperature": (1.0, np.float32),
    "top_k": (0, np.int64),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "repetition_penalty": (1.0, np.float32),
    "seed": (0, np.uint64),
    "step": (0, np.int64),
}


@dataclass(frozen=True)
class Side:
    device: Device
    kernels: Kernels

    def tensor(self, array: Any, dtype: Any = None) -> Tensor:
        return put(self.device, array, dtype)

    def read(self, tensor: Tensor) -> np.ndarray:
        return self.device.download(tensor)

    def sampling_state(
        self, batch: int, vocabulary: int, seen: Any = None, **parameters: Any
    ) -> SamplingState:
        """Of all rows alike, or of each its own where a parameter is a list."""
        rows = {
            name: self.tensor(np.broadcast_to(np.array(parameters.get(name, value), dtype), (batch,)))
            for name, (value, dtype) in SAMPLING.items()
        }
        return SamplingState(
            **rows, seen=self.tensor(np.zeros((batch, vocabulary), bool) if seen is None else seen)
        )

    def sample(self, logits: Any, state: SamplingState) -> list[int]:
        """One token per row of logits [B, V]."""
        logits = np.asarray(logits, np.float32)
        tokens = self.tensor(np.full(len(logits), -7))
        self.kernels.sample(self.tensor(logits[:, None]), state, tokens)
        return self.read(tokens).tolist()

    def log_probabilities(self, logits: Any, tokens: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and values [B, count + 1] for logits [B, V]."""
        logits = np.asarray(logits, np.float32)
        ids, values = (
            self.tensor(np.full((len(logits), count + 1), 9, dtype)) for dtype in (np.int64, np.float32)
        )
        self.kernels.log_probabilities(
            self.tensor(logits[:, None]), self.tensor(tokens, np.int64), ids, values
        )
        return self.read(ids), self.read(values)


def host_side() -> Side:
    """The reference."""
    device = CpuDevice()
    return Side(device, load_kernels(device))
