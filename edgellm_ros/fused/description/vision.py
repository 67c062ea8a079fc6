# SPDX-License-Identifier: Apache-2.0
"""`visual/fused.json`: a vision tower as the fused kernels take it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgellm_ros.fused.description.decoder import JsonFile, StoredWeight

FUSED_VISION_FILE = "visual/fused.json"


@dataclass(frozen=True)
class FusedVisionBlock:
    """Weights of a block; matrices are [fan_in, fan_out]."""

    norm1: StoredWeight
    norm1_bias: StoredWeight
    qkv: StoredWeight  # columns of queries, keys, values
    qkv_bias: StoredWeight | None
    proj: StoredWeight
    proj_bias: StoredWeight
    norm2: StoredWeight
    norm2_bias: StoredWeight
    fc1: StoredWeight
    fc1_bias: StoredWeight
    fc2: StoredWeight
    fc2_bias: StoredWeight


@dataclass(frozen=True)
class FusedMerger:
    """Weights of a merger, from the patches of a row of embeddings to this row."""

    norm: StoredWeight  # of one patch; of tiles and a deepstack merger, of all patches side by side
    norm_bias: StoredWeight
    first: StoredWeight
    first_bias: StoredWeight
    second: StoredWeight
    second_bias: StoredWeight


@dataclass(frozen=True)
class FusedVisionModel(JsonFile):
    """All contents of `visual/fused.json`."""

    file: str  # of the weights, in the same folder
    intermediate_size: int
    epsilon: float  # of the LayerNorms of one patch
    merger_epsilon: float  # of those of all patches side by side
    patch_embed: StoredWeight
    patch_embed_bias: StoredWeight | None  # null = in the positions
    positions: StoredWeight  # [points,H] of the learned grid; of tiles [1+P,H], the class token's first
    blocks: tuple[FusedVisionBlock, ...]
    merger: FusedMerger
    deepstack_mergers: tuple[FusedMerger, ...]

    def weights(self) -> Iterator[StoredWeight]:
        """Yield all weights."""
        for part in (self, *self.blocks, self.merger, *self.deepstack_mergers):
            yield from (value for value in vars(part).values() if isinstance(value, StoredWeight))
