# SPDX-License-Identifier: Apache-2.0
"""Moving averages of weights."""

from __future__ import annotations

import torch
from torch import nn

DECAY = 0.999  # of a step, lower at the beginning


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int) -> None:
    """Move the parameters of `average` towards those of `model`; step: from 0."""
    decay = min(DECAY, (step + 1) / (step + 10))
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
