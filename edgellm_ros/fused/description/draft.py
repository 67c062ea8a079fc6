# SPDX-License-Identifier: Apache-2.0
"""`draft/fused.json`: a draft head as the fused kernels take it.

The builder writes the file into the engine directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgellm_ros.engine_directory.draft_config import NUM_BASE_STATES
from edgellm_ros.fused.description.decoder import FusedLayer, JsonFile, StoredWeight

FUSED_DRAFT_FILE = "draft/fused.json"


@dataclass(frozen=True)
class StoredFusion:
    """Weights of the fusion of three states of the base, which runs with the base."""

    file: str  # of the weights, in the folder `llm`
    epsilon: float  # of every RMSNorm
    fc: StoredWeight  # [3*Hb,H]
    fc_bias: StoredWeight | None
    state_norms: tuple[StoredWeight, ...]  # of each state; empty = none
    joined_norm: StoredWeight | None  # of the states side by side

    def __post_init__(self) -> None:
        if len(self.state_norms) not in (0, NUM_BASE_STATES):
            raise ValueError(f"state_norms must be {NUM_BASE_STATES} or none, got {len(self.state_norms)}")

    def weights(self) -> Iterator[StoredWeight]:
        yield from (self.fc, *self.state_norms)
        yield from (weight for weight in (self.fc_bias, self.joined_norm) if weight is not None)


@dataclass(frozen=True)
class StoredProjection:
    """Weights of an MTP head that make one row of an embedding and a state."""

    embedding_norm: StoredWeight
    fc: StoredWeight  # [2H,H]
    state_first: bool  # the state is before the embedding


@dataclass(frozen=True)
class FusedDraftModel(JsonFile):
    """All contents of `draft/fused.json`; the head's sizes are in `config.json`.

    An EAGLE-3 head has a fusion, an MTP head a projection.
    """

    file: str  # of the weights, in the same folder
    intermediate_size: int
    epsilon: float  # of every RMSNorm
    norm_before_residual: bool  # the residual stream begins with the normed states
    attention_gate: bool  # a gate beside each head's query
    layers: tuple[FusedLayer, ...]  # of EAGLE-3, `qkv` of the first has 2H rows: embedding and state
    hidden_norm: StoredWeight  # of the states
    norm: StoredWeight  # of the last norm
    lm_head: StoredWeight  # [H,V] or more columns
    fusion: StoredFusion | None
    projection: StoredProjection | None

    def __post_init__(self) -> None:
        if (self.fusion is None) == (self.projection is None):
            raise ValueError("a head has either a fusion or a projection")

    def weights(self) -> Iterator[StoredWeight]:
        """Yield all weights but those of the fusion."""
        for layer in self.layers:
            yield from layer.weights()
        yield from (self.hidden_norm, self.norm, self.lm_head)
        if self.projection is not None:
            yield from (self.projection.embedding_norm, self.projection.fc)
