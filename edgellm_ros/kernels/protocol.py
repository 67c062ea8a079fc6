# SPDX-License-Identifier: Apache-2.0
"""The interface of the kernels and the tensors that they share.

Letters in shapes: B sequences, S tokens of each, H hidden size, D head size, C cache capacity, V vocabulary,
L layers of a cache (keys of each layer of the model, then values of each), R multimodal rows, P positions.
Token ids and lengths are int64. Outputs are written into tensors that the caller made: a kernel allocates
nothing on the device. Every result depends on its own row only, never on the other rows of the batch.
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
class StopState:
    """When each sequence of a batch has had its last decode step.

    steps_left [B] i64: decode steps that still count for the sequence; stop_ids [n] i64, n >= 1 (-1: no
    token): those after which none does; final_token [B] i64: the stop token after which one more step counts,
    to write that token's keys and values (-1: none).
    """

    steps_left: Tensor
    stop_ids: Tensor
    final_token: Tensor


@dataclass(frozen=True)
class SequenceCache:
    """One sequence's rows in a KV cache [L,B,Hkv,C,D], at `index`; length, rope_delta [1] i64.

    Windows on the memory, not copies. A token at index i of the sequence stands at position i + rope_delta.
    """

    cache: Tensor
    index: int
    length: Tensor
    rope_delta: Tensor

    @property
    def keys(self) -> list[Tensor]:
        """Keys of each layer of the model, [1,Hkv,C,D]."""
        return self._layers(0, self.cache.shape[0] // 2)

    @property
    def values(self) -> list[Tensor]:
        """Values of each layer of the model, [1,Hkv,C,D]."""
        return self._layers(self.cache.shape[0] // 2, self.cache.shape[0])

    def _layers(self, start: int, stop: int) -> list[Tensor]:
        batch, *rest = self.cache.shape[1:]
        return [
            self.cache.rows(i, i + 1).view(batch, *rest).rows(self.index, self.index + 1)
            for i in range(start, stop)
        ]


class Kernels(Protocol):
    """Computation between engines, on one kind of device."""

    def embed(self, token_ids: Tensor, table: Tensor, multimodal_rows: Tensor, out: Tensor) -> None:
        """Out [B,S,H]: row `id` of table [V,H], or row `id - V` of multimodal_rows [R,H] for ids from V.

        An id of -1 (no token could be drawn) takes row 0.
        """
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

    def visible_rows(self, lengths: Tensor, steps: int, out: Tensor) -> None:
        """Out [B]: lengths [B] + steps: how many rows of each cache are filled with `steps` tokens more.

        For engines that mask later tokens by themselves.
        """
        ...

    def copy_cache_rows(
        self,
        source: Tensor,
        source_at: tuple[int, int],
        target: Tensor,
        target_at: tuple[int, int],
        count: int,
    ) -> None:
        """Copy `count` rows of every layer and head of one sequence, source [L,B1,Hkv,C1,D] to target
        [L,B2,Hkv,C2,D].

        source_at, target_at: (sequence, first row). Source and target do not overlap.
        """
        ...

    def rotate_sequences(self, cache: Tensor, first: int, last: int, count: int) -> None:
        """Move sequence `first` of a cache [L,B,Hkv,C,D] behind `last`; those between move up by one.

        In place, rows 0 .. count-1 of each; other rows stay as they are.
        """
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

    def advance(self, lengths: Tensor, state: StopState) -> None:
        """Count a decode step: where steps_left > 0, lengths [B] grows by one and steps_left falls by one."""
        ...

    def stop_test(self, tokens: Tensor, state: StopState) -> None:
        """Where steps_left > 0 and tokens [B] is one of stop_ids, set steps_left.

        To 1 where it is the sequence's final_token, else to 0.
        """
        ...

    def log_probabilities(self, logits: Tensor, tokens: Tensor, top_ids: Tensor, top_values: Tensor) -> None:
        """Log-probabilities of logits [B,1,V] as they are (no penalty, temperature 1), natural logarithm.

        top_ids, top_values [B,K+1]: the K most likely tokens in falling order, then `tokens[b]`. A row whose
        token is -1 may hold anything.
        """
        ...

    def euler_step(self, x: Tensor, velocity: Tensor, dt: float) -> None:
        """X += dt * velocity."""
        ...
