# SPDX-License-Identifier: Apache-2.0
"""Copies from the host to the GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: str | torch.device) -> Tensor:
    """Copy an array to the device as a tensor, asynchronously.

    A copy from pageable memory would wait until the GPU has finished all queued work, and leave the GPU idle
    until more is queued. On the CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
