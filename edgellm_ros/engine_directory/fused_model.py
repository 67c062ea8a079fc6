# SPDX-License-Identifier: Apache-2.0
"""`llm/fused.json` of an engine directory: a dense decoder as the fused kernels take it.

The file names the weights of every layer and their places in the file of weights, so that kernels can run on
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


@dataclass(frozen=True)
class StoredWeight:
    """One weight in the file of weights, of the engine's precision."""

    name: str  # of the graphs' initializer
    offset: int  # in bytes
    shape: tuple[int, ...]  # matrices: [fan_in, fan_out], row-major

    def __post_init__(self) -> None:
        if self.offset < 0 or not self.shape or min(self.shape) < 1:
            raise ValueError(f"{self.name} has offset {self.offset} and shape {list(self.shape)}")

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FusedLayer:
    """Weights of one layer; null = the layer has none."""

    window: int | None  # sliding window; null = the layer attends to all tokens
    input_norm: StoredWeight
    qkv: StoredWeight  # columns of queries, keys, values
    qkv_bias: StoredWeight | None
    q_norm: StoredWeight | None
    k_norm: StoredWeight | None
    o: StoredWeight
    o_bias: StoredWeight | None
    post_norm: StoredWeight
    gate_up: StoredWeight  # columns of the gate, then of the up-projection
    gate_up_bias: StoredWeight | None
    down: StoredWeight
    down_bias: StoredWeight | None

    def weights(self) -> Iterator[StoredWeight]:
        """Yield the weights that the layer has."""
        return (value for value in vars(self).values() if isinstance(value, StoredWeight))


@dataclass(frozen=True)
class FusedModel:
    """All contents of `llm/fused.json`."""

    file: str  # of the weights, in the same folder
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
