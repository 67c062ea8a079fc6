# SPDX-License-Identifier: Apache-2.0
"""AWQ's search: scales of a layer's inputs with which rounding changes it least.

An input that is large in use makes the rounding errors of its weights large in the output. With s the weights
of these inputs are larger when they are rounded, so that their steps are smaller beside them:

    s = mean|x|^alpha / sqrt(largest * smallest)      alpha = 0, 0.05, ..., 0.95; 0 is plain rounding

The alpha is taken that makes |W x - Q(W diag(s)) (x / s)|^2 smallest, summed over calibration inputs and the
layers of a group. Then the largest magnitudes of each group of weights that share a step are cut off, down to
the share (1, 0.95, ..., 0.55) that makes the error of its part of the output smallest. The searches are those
of AWQ, the rounding is that of rounding.py.

Source: Lin et al., AWQ, arXiv 2306.00978; llm-awq, awq/quantize/auto_scale.py and auto_clip.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from edgellm_ros.builder.calibration.folding import InputGroup
from edgellm_ros.builder.calibration.rounding import RoundedLayout
from edgellm_ros.builder.weights.weights import Weights

EXPONENTS = np.arange(20) / 20
SHARES = 1 - np.arange(10, dtype=np.float32) / 20
NOT_CUT = ("q_proj", "k_proj")  # errors of queries and keys are multiplied: AWQ keeps their steps
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
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    # ^ share of its largest magnitude that each group of weights keeps [N,K/group], by layer


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
    exponents = EXPONENTS if group.source is not None else EXPONENTS[:1]
    candidates = [candidate(magnitudes, exponent) for exponent in exponents]
    errors = np.zeros(len(candidates))
    for layer in rounded:
        for _, size, rows in _strips(weights, layout, layer):
            for index, scales in enumerate(candidates):
                errors[index] += _error(layout.rounded(rows * scales, size) / scales - rows, inputs.rows)
    best = int(errors.argmin())
    scales = candidates[best]
    kept = {
        layer: search_kept(weights, layout, layer, scales, inputs.rows / scales)
        for layer in rounded
        if not layer.endswith(NOT_CUT)
    }
    error = 0.0
    for layer in rounded:
        for start, size, rows in _strips(weights, layout, layer):
            here = kept[layer][start : start + STRIP] if layer in kept else None
            error += _error(layout.rounded(rows * scales, size, here) / scales - rows, inputs.rows)
    relative = error / errors[0] if errors[0] else 1.0
    return GroupScales(group, float(EXPONENTS[best]), scales, relative, kept)


def _strips(weights: Weights, layout: RoundedLayout, layer: str) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield each strip of a layer: first output, size of groups and weights [n,K]."""
    size, weight = layout.group_of(weights.tensors, layer), weights.stored(f"{layer}.weight")
    assert size is not None
    for start in range(0, weight.rows, STRIP):
        yield start, size, weight.read(start, start + STRIP).astype(np.float32)


def _error(changed: np.ndarray, inputs: np.ndarray) -> float:
    """Return the outputs' squared error by changes [n,K] of weights, for inputs [T,K]."""
    return float(np.square(inputs @ changed.T, dtype=np.float64).sum())


def search_kept(
    weights: Weights, layout: RoundedLayout, layer: str, scales: np.ndarray, inputs: np.ndarray
) -> np.ndarray:
    """Choose at which share of its largest magnitude each group is clipped.

    Returns shares [N,K/group] of a layer's weights. inputs [T,K]: scaled already. The error of a group is
    that of its term in the layer's output.
    """
    size = layout.group_of(weights.tensors, layer)
    assert size is not None
    blocks = inputs.reshape(len(inputs), -1, size).transpose(1, 2, 0)
    products = blocks @ blocks.transpose(0, 2, 1)  # [K/group,group,group]: sums over inputs
    found = []
    for _, _, rows in _strips(weights, layout, layer):
        rows = rows * scales
        errors = []
        for share in SHARES:
            changed = layout.rounded(rows, size, share) - rows
            parts = changed.reshape(len(rows), -1, size).transpose(1, 0, 2)  # [K/group,n,group]
            errors.append(((parts @ products) * parts).sum(-1).T)
        found.append(SHARES[np.argmin(errors, axis=0)])
    return np.concatenate(found)
