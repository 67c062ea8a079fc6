# SPDX-License-Identifier: Apache-2.0
"""Quantises the layers of an unquantised checkpoint: rounds them to nearest.

Groups of inputs share a scale. With 8 bits it is the largest magnitude over 127. With 4 bits it is the value
of the largest magnitude over -8, so it may be negative: this value is kept, those of the other sign are cut
off at 7/8 of it. (On Gaussian weights that leaves 22% less squared error than the largest magnitude over 7.)
With `kept` of a calibration the scale is a share of that, and larger values are cut off there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from edgellm_ros.builder.checkpoint.safetensors_file import FLOATS, StoredTensor
from edgellm_ros.builder.quantization.matrix import INT4, INT8, QuantizedMatrix
from edgellm_ros.builder.quantization.tensors import Stored
from edgellm_ros.engine_directory.choices import GROUP_SIZES, ROUNDINGS

TYPES = dict(zip(ROUNDINGS, ((INT4, 7), (INT8, 127)), strict=True))
SMALLEST_GROUP = 16
STRIP = 128  # outputs that are rounded at once, in the CPU's cache: 4 times as fast as all
# The decays of a gated delta net: small matrices, whose errors add up over all tokens.
KEPT = ("in_proj_a", "in_proj_b")


class RoundedLayout:
    """Rounds the layers of modules, such as those of a language model's decoder."""

    def __init__(
        self,
        kind: str,
        group: int,
        layers: str | tuple[str, ...],
        dtype: np.dtype,
        kept: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Make a layout.

        kind: one of TYPES; group: one of GROUP_SIZES; layers: the module, such as "model.layers", or several;
        dtype: of the scales in the graph; kept: share of its largest magnitude that each group keeps
        [N,K/group], by layer, where that is less than 1.
        """
        if kind not in TYPES:
            raise ValueError(f"quantize must be one of {', '.join(TYPES)}, got {kind!r}")
        if group not in GROUP_SIZES:
            raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group}")
        self._dtype, self._top = TYPES[kind]
        modules = (layers,) if isinstance(layers, str) else layers
        self._layers = tuple(f"{module}." for module in modules)
        self._group, self._scale_type = group, dtype
        self._kept = dict(kept or {})

    def matrix(self, tensors: Stored, module: str) -> QuantizedMatrix | None:
        """Return the rounded weight of a layer; None if the layer stays as it is."""
        group = self.group_of(tensors, module)
        if group is None:
            return None
        weight = tensors[f"{module}.weight"]
        fan_out, fan_in = weight.shape
        return QuantizedMatrix(
            fan_in=fan_in,
            fan_out=fan_out,
            dtype=self._dtype,
            group=group,
            values=lambda: self._values(weight, group, self._kept.get(module)),
            scales=lambda: self._scales(weight, group, self._kept.get(module)),
        )

    def group_of(self, tensors: Stored, module: str) -> int | None:
        """Return how many inputs of a layer share a scale; None if it stays as it is."""
        weight = tensors.get(f"{module}.weight")
        if weight is None or weight.dtype not in FLOATS or len(weight.shape) != 2 or 0 in weight.shape:
            return None
        if not f"{module}.".startswith(self._layers) or module.endswith(KEPT):
            return None
        fan_in = weight.shape[1]
        group = min(self._group, fan_in & -fan_in) if fan_in % self._group else self._group
        return None if group < SMALLEST_GROUP else group

    def rounded(self, rows: np.ndarray, group: int, kept: np.ndarray | float | None = None) -> np.ndarray:
        """Round weights [N,K] fp32 to the values of their integers times scales."""
        blocks = rows.reshape(len(rows), -1, group).copy()
        scales = self._scales_of(blocks, kept)
        self._round(blocks, scales)
        return (blocks * scales[:, :, None]).reshape(rows.shape)

    def _values(self, weight: StoredTensor, group: int, kept: np.ndarray | None) -> np.ndarray:
        """Compute values [K,N]."""
        values = np.empty(weight.shape, np.int8)
        for start, blocks, scales in self._strips(weight, group, kept):
            self._round(blocks, scales)
            values[start : start + len(blocks)] = blocks.reshape(len(blocks), -1)
        return values.T

    def _scales(self, weight: StoredTensor, group: int, kept: np.ndarray | None) -> np.ndarray:
        """Compute scales [K/group,N]."""
        return np.concatenate([scales for _, _, scales in self._strips(weight, group, kept)]).T

    def _strips(
        self, weight: StoredTensor, group: int, kept: np.ndarray | None
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield each strip's first output, weights [n,K/group,group], scales [n,K/group]."""
        for start in range(0, weight.shape[0], STRIP):
            rows = weight.read(start, start + STRIP).astype(np.float32)
            blocks = rows.reshape(len(rows), -1, group)
            here = None if kept is None else kept[start : start + STRIP]
            yield start, blocks, self._scales_of(blocks, here)

    def _scales_of(self, blocks: np.ndarray, kept: np.ndarray | float | None) -> np.ndarray:
        """Compute scales [n,K/group] of weights [n,K/group,group].

        The scales have the precision of the graph.
        """
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
        scales = largest / -(self._top + 1) if self._dtype == INT4 else np.abs(largest) / self._top
        if kept is not None:
            scales *= kept
        tiny = np.finfo(np.float16).tiny
        scales = np.where(np.abs(scales) < tiny, tiny, scales)
        return scales.astype(self._scale_type).astype(np.float32)

    def _round(self, blocks: np.ndarray, scales: np.ndarray) -> None:
        """Replace weights [n,K/group,group] by their integers."""
        blocks /= scales[:, :, None]
        np.rint(blocks, out=blocks)
        np.clip(blocks, -self._top - 1, self._top, out=blocks)


def decoder_layers(embedding: str) -> str:
    """Return the module of a decoder's layers by the name of its embedding table."""
    return f"{embedding.rsplit('.', 2)[0]}.layers"
