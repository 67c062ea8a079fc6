# SPDX-License-Identifier: Apache-2.0
"""The interface of the kernels and the tensors that they share.

Letters in shapes: B sequences, S tokens of each, H hidden size, D head size, C cache capacity, V vocabulary,
R multimodal rows, P positions. Token ids and lengths are int64. Outputs are written into tensors that the
caller made: a kernel allocates nothing on the device. Every result depends on its own row only, never on the
other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.engine.tensor import Tensor


@dataclass(frozen=True)
class RopeTable:
    """cos and sin [P, D/2] float32 of every position and frequency."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class SamplingState:
    """How the next token of each sequence is drawn.

    Rows stay with their sequence from its first token to its last. temperature [B] f32 (0 = the most likely
    token), top_k [B] i64 (0 = off), top_p, min_p, repetition_penalty [B] f32, seed [B] u64, step [B] i64
    (tokens drawn so far), seen [B, V] bool (tokens in the prompt or drawn already).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor
    step: Tensor
    seen: Tensor


@dataclass(frozen=True)
class SequenceCache:
    """One sequence's KV cache: keys, values per layer [1,Hkv,C,D]; length, rope_delta [1].

    Windows on the memory, not copies. A token at index i of the sequence stands at position i + rope_delta.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    length: Tensor
    rope_delta: Tensor


class Kernels(Protocol):
    """Computation between engines, on one kind of device."""

    def embed(self, token_ids: Tensor, table: Tensor, multimodal_rows: Tensor, out: Tensor) -> None:
        """Out [B,S,H]: row `id` of table [V,H], or row `id - V` of multimodal_rows [R,H] for ids from V."""
        ...

    def deepstack(self, token_ids: Tensor, vocab_size: int, multimodal_rows: Tensor, out: Tensor) -> None:
        """Out [B,S,H]: row `id - vocab_size` of multimodal_rows [R,H] for ids from vocab_size, else zeros."""
        ...

    def rope_rows(self, table: RopeTable, lengths: Tensor, deltas: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Write cos, sin [B,S,D/2] of text that follows.

        Token i of sequence b stands at position lengths[b] + deltas[b] + i.
        """
        ...

    def mrope_rows(
        self, table: RopeTable, positions: Tensor, mrope_section: Sequence[int], cos: Tensor, sin: Tensor
    ) -> None:
        """cos, sin [B,S,D/2] of tokens at positions [B,3,S] (time, height, width), interleaved as in Qwen3.

        Frequency j belongs to height if j % 3 == 1 and j < 3 * mrope_section[1], to width if j % 3 == 2 and
        j < 3 * mrope_section[2], else to time. An empty mrope_section takes time for all.
        """
        ...

    def causal_mask(self, lengths: Tensor, out: Tensor) -> None:
        """Out [B,1,S,C] bool: new token i of sequence b sees the cache rows 0 .. lengths[b] + i."""
        ...

    def copy_cache_rows(
        self, source: Tensor, source_start: int, target: Tensor, target_start: int, count: int
    ) -> None:
        """Copy `count` rows of each head from source [1,Hkv,C1,D] to target [1,Hkv,C2,D]."""
        ...

    def sample(self, logits: Tensor, state: SamplingState, tokens: Tensor) -> None:
        """Tokens [B]: the next token of each row of logits [B,1,V], or -1 where logits are not finite.

        Repetition penalty, temperature, top-k, top-p, min-p are applied in this order (that of transformers);
        equally likely tokens rank by id. The drawn token is marked in `state.seen` and `state.step` is
        advanced.
        """
        ...

    def map_tokens(self, tokens: Tensor, vocab_map: Tensor, out: Tensor) -> None:
        """Out [B]: vocab_map[tokens[b]], or -1 where tokens [B] has -1."""
        ...

    def log_probabilities(self, logits: Tensor, tokens: Tensor, top_ids: Tensor, top_values: Tensor) -> None:
        """Log-probabilities of logits [B,1,V] as they are (no penalty, temperature 1), natural logarithm.

        top_ids, top_values [B,K+1]: the K most likely tokens in falling order, then `tokens[b]`.
        """
        ...

    def euler_step(self, x: Tensor, velocity: Tensor, dt: float) -> None:
        """X += dt * velocity."""
        ...
