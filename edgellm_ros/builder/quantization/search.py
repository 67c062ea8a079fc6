# SPDX-License-Identifier: Apache-2.0
"""The search of AWQ: scales of a layer's inputs with which rounding its weights changes least.

An input that is large in use makes the rounding errors of its weights large in the output. With s the weights
of these inputs are larger when they are rounded, so that their steps are smaller beside them:

    s = mean|x|^alpha / sqrt(largest * smallest)      alpha = 0, 0.05, ..., 0.95; 0 is plain rounding

The alpha is taken that makes |W x - Q(W diag(s)) (x / s)|^2 smallest, summed over calibration inputs and the
layers of a group. Source: Lin et al., AWQ, arXiv 2306.00978; llm-awq, awq/quantize/auto_scale.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.quantization.folding import InputGroup
from edgellm_ros.builder.quantization.rounding import RoundedLayout

EXPONENTS = np.arange(20) / 20
SMALLEST = 1e-4  # of mean|x|^alpha
STRIP = 256  # outputs whose errors are computed at once


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of linear layers while the model ran."""

    magnitudes: np.ndarray  # [K] mean|x| over all tokens
    rows: np.ndarray  # [T,K] of some of the tokens, fp32


@dataclass(frozen=True, eq=False)
class GroupScales:
    """Scales of a group's inputs."""

    group: InputGroup
    exponent: float
    scales: np.ndarray  # [K] fp32
    error: float  # squared error of the outputs, over that of plain rounding


def candidate(magnitudes: np.ndarray, exponent: float) -> np.ndarray:
    """Compute the scales [K] of an exponent."""
    scales = np.maximum(magnitudes.astype(np.float64) ** exponent, SMALLEST)
    return (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)


def search_scales(
    weights: Weights, layout: RoundedLayout, group: InputGroup, inputs: LayerInputs
) -> GroupScales | None:
    """Choose the scales of a group; None if none of its layers is rounded."""
    rounded = [layer for layer in group.layers if layout.group_of(weights.tensors, layer) is not None]
    if not rounded:
        return None
    magnitudes = group.share(inputs.magnitudes)
    candidates = [candidate(magnitudes, exponent) for exponent in EXPONENTS]
    errors = np.zeros(len(candidates))
    for layer in rounded:
        size, weight = layout.group_of(weights.tensors, layer), weights.stored(f"{layer}.weight")
        assert size is not None
        for start in range(0, weight.rows, STRIP):
            rows = weight.read(start, start + STRIP).astype(np.float32)
            for index, scales in enumerate(candidates):
                changed = layout.rounded(rows * scales, size) / scales - rows
                errors[index] += float(np.square(inputs.rows @ changed.T, dtype=np.float64).sum())
    best = int(errors.argmin())
    relative = errors[best] / errors[0] if errors[0] else 1.0
    return GroupScales(group, float(EXPONENTS[best]), candidates[best], float(relative))
