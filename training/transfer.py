# SPDX-License-Identifier: Apache-2.0
"""The way from the host to the GPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: str | torch.device) -> Tensor:
    """An array as a tensor on the device, where it may arrive later.

    A copy from ordinary memory would wait until the GPU has done all that it was told before, which then
    stands still until it is told more. On the CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
