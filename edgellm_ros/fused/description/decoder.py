# SPDX-License-Identifier: Apache-2.0
"""`llm/fused.json`: a decoder as the fused kernels take it.

The file names the weights of every layer and their offsets in the file of weights, so that kernels run
without the graph.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.engine_directory.schema import from_dict, read_json, to_dict
from edgellm_ros.fused.description.values import ModelValues

if TYPE_CHECKING:
    from typing_extensions import Self

FUSED_FILE = "llm/fused.json"
MATRICES = ("qkv", "o", "gate_up", "down", "in_proj", "out_proj")  # of a layer, by kernel


class JsonFile:
    """A dataclass that is the contents of a JSON file."""

    def contents(self) -> bytes:
        return (json.dumps(to_dict(self), indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file. FileNotFoundError, or ValueError that names file and key."""
        return from_dict(cls, read_json(path), str(path))


@dataclass(frozen=True)
class StoredWeight:
    """One weight in the file of weights, of the engine's precision or in fp32."""

    name: str  # of the graphs' initializer
    offset: int  # in bytes
    shape: tuple[int, ...]  # matrices: [fan_in, fan_out], row-major
    fp32: bool = False  # in every precision

    def __post_init__(self) -> None:
        if self.offset < 0 or not self.shape or min(self.shape) < 1:
            raise ValueError(f"{self.name} has offset {self.offset} and shape {list(self.shape)}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [K,N] in 4 or 8 bits.

    An element is (value - zero point) * scale + offset. Integers and zero points are unsigned. Of two 4-bit
    values in a byte, the first is in the low nibble.
    """

    file: str  # of all its weights, in the same folder
    bits: int  # of a value, 4 or 8
    group: int  # rows that share a scale
    values: StoredWeight  # uint8 [N,K/group,bytes]
    scales: StoredWeight  # [N,K/group], of the engine's precision; of FP8 in fp32
    zero_points: StoredWeight | None  # uint8 [N,bytes]; null = half of the range, of FP8 0
    float8: bool  # values are E4M3 instead of integers
    order: StoredWeight | None  # int64 [K]: the input that each row multiplies; null = 0, 1, 2, ...
    offsets: StoredWeight | None  # [K/group,N], of the engine's precision; null = 0

    @property
    def form(self) -> tuple[int, int, bool, bool, bool, bool]:
        """Return what kernels depend on, the fields of `Quantized`."""
        group = 0 if self.float8 and self.scales.shape[1] == 1 else self.group
        points, ordered = self.zero_points is not None, self.order is not None
        return self.bits, group, points, self.float8, ordered, self.offsets is not None


@dataclass(frozen=True)
class QuantizedMatrices:
    """The matrices of a layer that are quantised; null = this one is not."""

    qkv: QuantizedMatrix | None
    o: QuantizedMatrix | None
    gate_up: QuantizedMatrix | None
    down: QuantizedMatrix | None
    in_proj: QuantizedMatrix | None
    out_proj: QuantizedMatrix | None

    def given(self) -> Iterator[tuple[str, QuantizedMatrix]]:
        """Yield the quantised matrices by name."""
        return ((name, matrix) for name, matrix in vars(self).items() if matrix is not None)


@dataclass(frozen=True)
class FusedMixer:
    """Weights of a recurrent mixer; null = it has none, or has it quantised.

    All but matrices are fp32.
    """

    in_proj: StoredWeight | None
    out_proj: StoredWeight | None
    taps: StoredWeight  # [K,C], of the convolution
    conv_bias: StoredWeight | None
    decay: StoredWeight  # -exp(A_log)
    dt_bias: StoredWeight
    skip: StoredWeight | None  # D of Mamba2
    mixer_norm: StoredWeight  # of the result

    def weights(self) -> Iterator[StoredWeight]:
        """Yield the weights that are not quantised."""
        return _stored(self)


@dataclass(frozen=True)
class FusedLayer:
    """Weights of one layer; null = the layer has none, or has it quantised."""

    window: int | None  # sliding window; null = the layer attends to all tokens
    mixer: FusedMixer | None  # what is recurrent in place of attention
    input_norm: StoredWeight | None
    qkv: StoredWeight | None  # columns of queries (each with its gate, if there is one), keys, values
    qkv_bias: StoredWeight | None
    q_norm: StoredWeight | None
    k_norm: StoredWeight | None
    o: StoredWeight | None
    o_bias: StoredWeight | None
    post_norm: StoredWeight | None
    gate_up: StoredWeight | None  # columns of the gate, if there is one, then of the up-projection
    gate_up_bias: StoredWeight | None
    down: StoredWeight | None
    down_bias: StoredWeight | None

    def plain_matrices(self) -> list[str]:
        """Return the kernels whose matrices are not quantised."""
        parts = [self] if self.mixer is None else [self, self.mixer]
        given = {name for part in parts for name, value in vars(part).items() if value is not None}
        return [name for name in MATRICES if name in given]

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention, and so a KV cache."""
        return self.input_norm is not None and self.mixer is None

    def weights(self) -> Iterator[StoredWeight]:
        """Yield the weights that are not quantised, without those of the mixer."""
        return _stored(self)


def _stored(block: FusedMixer | FusedLayer) -> Iterator[StoredWeight]:
    return (value for value in vars(block).values() if isinstance(value, StoredWeight))


@dataclass(frozen=True)
class FusedModel(ModelValues, JsonFile):
    """All contents of `llm/fused.json`."""

    problem: str | None  # why the fused kernels cannot run the model; `layers` is empty then
    file: str  # of the weights that are not quantised, in the same folder
    intermediate_size: int
    activation: str  # of the feed-forward blocks
    rope: bool  # whether queries and keys are rotated
    tied: bool  # the LM head is the embedding table, which the runtime holds
    layers: tuple[FusedLayer, ...]
    quantized: tuple[QuantizedMatrices, ...]  # of each layer; empty = none is quantised
    norm: StoredWeight  # of the last norm
    lm_head: (
        StoredWeight | None
    )  # [H,V], or with more columns, a multiple of 8; null = an input, or quantised
    quantized_head: QuantizedMatrix | None  # the LM head; null = it is not quantised

    def unshared(self) -> Iterator[StoredWeight]:
        """Yield weights that ONNX Runtime does not share.

        These are the weights in fp32, quantised ones in FP8, and orders.
        """
        yield from (weight for weight in self.weights() if weight.fp32)
        for matrix in self.quantized_matrices():
            if matrix.float8:
                yield from (matrix.values, matrix.scales)
            if matrix.order is not None:
                yield matrix.order

    def quantized_matrices(self) -> Iterator[QuantizedMatrix]:
        """Yield all quantised matrices."""
        for matrices in self.quantized:
            yield from (matrix for _, matrix in matrices.given())
        if self.quantized_head is not None:
            yield self.quantized_head

    def weights(self) -> Iterator[StoredWeight]:
        """Yield all weights that are not quantised."""
        for layer in self.layers:
            yield from layer.weights()
            if layer.mixer is not None:
                yield from layer.mixer.weights()
        yield self.norm
        if self.lm_head is not None:
            yield self.lm_head
