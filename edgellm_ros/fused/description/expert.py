# SPDX-License-Identifier: Apache-2.0
"""`action/fused.json`: the action expert as the fused kernels take it.

The builder writes the file into the engine directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgellm_ros.fused.description.decoder import JsonFile, StoredWeight

FUSED_EXPERT_FILE = "action/fused.json"


@dataclass(frozen=True)
class FusedExpertLayer:
    """Weights of one layer; matrices are [fan_in, fan_out]."""

    input_norm: StoredWeight
    qkv: StoredWeight  # columns of queries, keys, values
    q_norm: StoredWeight
    k_norm: StoredWeight
    o: StoredWeight
    post_norm: StoredWeight
    gate_up: StoredWeight  # columns of the gate, then of the up-projection
    down: StoredWeight


@dataclass(frozen=True)
class FusedTime:
    """The embedding of an Euler step's time.

    Sines and cosines of the time pass through two linear layers with SiLU between them.
    """

    min_period: float
    max_period: float
    first: StoredWeight
    first_bias: StoredWeight
    second: StoredWeight
    second_bias: StoredWeight


@dataclass(frozen=True)
class FusedExpertModel(JsonFile):
    """All contents of `action/fused.json`."""

    file: str  # of the weights, in the same folder
    hidden_size: int
    intermediate_size: int
    epsilon: float  # of every RMSNorm
    time: FusedTime
    in_proj: StoredWeight
    in_bias: StoredWeight
    layers: tuple[FusedExpertLayer, ...]
    norm: StoredWeight  # of the last norm
    out_proj: StoredWeight
    out_bias: StoredWeight

    def weights(self) -> Iterator[StoredWeight]:
        for part in (self, self.time, *self.layers):
            yield from (value for value in vars(part).values() if isinstance(value, StoredWeight))
