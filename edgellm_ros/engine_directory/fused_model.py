# SPDX-License-Identifier: Apache-2.0
"""`llm/fused.json` of an engine directory: a dense decoder as the fused kernels take it.

The file names the weights of every layer and their places in the files of weights, so that kernels can run on
them without the graph.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.engine_directory.schema import from_dict, read_json, to_dict

FUSED_FILE = "llm/fused.json"
ITEM_BYTES = {"fp16": 2, "bf16": 2, "uint8": 1}


@dataclass(frozen=True)
class StoredWeight:
    """One weight in a file of weights."""

    name: str  # of the graph's initializer
    file: str  # in the same folder
    offset: int  # in bytes
    dtype: str  # one of ITEM_BYTES
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.offset < 0 or not self.shape or min(self.shape) < 1:
            raise ValueError(f"{self.name} has offset {self.offset} and shape {list(self.shape)}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name} has dtype {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Quantization:
    """How a matrix [K,N] is quantised: an element is (value - zero point) * scale.

    Values and zero points are unsigned. Of two of 4 bits in a byte the first is in the lower half.
    """

    bits: int  # of a value, 4 or 8
    group: int  # rows that share a scale
    scales: StoredWeight  # [N,K/group]
    zero_points: StoredWeight | None  # [N,bytes]; null = half of the range


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [K,N]: K inputs, N outputs."""

    values: StoredWeight  # [K,N]; quantised [N,K/group,bytes]
    quantized: Quantization | None  # null = the values are of the engine's precision

    def weights(self) -> Iterator[StoredWeight]:
        """Yield values, scales and zero points."""
        yield self.values
        if self.quantized is not None:
            yield self.quantized.scales
            if self.quantized.zero_points is not None:
                yield self.quantized.zero_points


@dataclass(frozen=True)
class FusedLayer:
    """Weights of one layer; null = the layer has none."""

    window: int | None  # sliding window; null = the layer attends to all tokens
    input_norm: StoredWeight
    qkv: StoredMatrix  # columns of queries, keys, values
    qkv_bias: StoredWeight | None
    q_norm: StoredWeight | None
    k_norm: StoredWeight | None
    o: StoredMatrix
    o_bias: StoredWeight | None
    post_norm: StoredWeight
    gate_up: StoredMatrix  # columns of the gate, then of the up-projection
    gate_up_bias: StoredWeight | None
    down: StoredMatrix
    down_bias: StoredWeight | None

    def weights(self) -> Iterator[StoredWeight]:
        """Yield the weights that the layer has; those of a matrix follow each other."""
        for value in vars(self).values():
            if isinstance(value, StoredWeight):
                yield value
            elif isinstance(value, StoredMatrix):
                yield from value.weights()


@dataclass(frozen=True)
class FusedModel:
    """All contents of `llm/fused.json`."""

    problem: str | None  # why the fused kernels cannot run the model, which then has no layers here
    intermediate_size: int
    epsilon: float  # of every RMSNorm
    activation: str  # of the gate
    rope_interleaved: bool  # a pair of rotated values is (2i, 2i + 1); else (i, i + R/2)
    tied: bool  # the LM head is the embedding table, which the runtime holds
    layers: tuple[FusedLayer, ...]
    norm: StoredWeight  # of the last norm
    lm_head: StoredWeight | None  # [H,V]; null = an input of the graph

    def weights(self) -> Iterator[StoredWeight]:
        """Yield all weights."""
        for layer in self.layers:
            yield from layer.weights()
        yield self.norm
        if self.lm_head is not None:
            yield self.lm_head

    def contents(self) -> bytes:
        """Return the contents of the file."""
        return (json.dumps(to_dict(self), indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def load(cls, path: Path) -> FusedModel:
        """Read the file. FileNotFoundError, or ValueError that names file and key."""
        return from_dict(cls, read_json(path), str(path))
