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
    """Hold how the next tokens of each sequence are sampled, a row for each sequence."""

    temperature: Tensor  # [B] f32; 0 = the most likely token
    top_k: Tensor  # [B] i64; 0 = off
    top_p: Tensor  # [B] f32; 1 = off
    min_p: Tensor  # [B] f32; 0 = off
    repetition_penalty: Tensor  # [B] f32; 1 = off
    seed: Tensor  # [B] u64
    position: Tensor  # [B] i64, of the next token in the answer: how many are committed
    seen: Tensor  # [B, V] bool, tokens of the prompt and committed tokens of the answer

    def rows(self, start: int, stop: int) -> SamplingState:
        """Return the state of sequences start..stop-1, windows on the same memory."""
        return SamplingState(**{name: tensor.rows(start, stop) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class StopState:
    """Hold when each sequence of a batch has had its last token."""

    tokens_left: Tensor  # [B] i64, tokens that the sequence may still take
    trigger_token: Tensor  # [B] i64, the stop token whose KV row is needed; -1 = none
    stop_ids: Tensor  # [n] i64, n >= 1, tokens that end an answer; -1 = none

    def rows(self, start: int, stop: int) -> StopState:
        """Return the state of sequences start..stop-1, windows on the same memory."""
        return StopState(
            self.tokens_left.rows(start, stop), self.trigger_token.rows(start, stop), self.stop_ids
        )


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

    def sample(self, logits: Tensor, state: SamplingState, tokens: Tensor) -> None:
        """Sample tokens [B,N] from logits [B,N,V]; -1 where a row of logits is not finite.

        Token n of sequence b stands at position state.position[b] + n of the answer: its random number
        depends on that and on the seed. Repetition penalty (of state.seen), temperature, top-k, top-p, min-p
        are applied in this order (that of transformers); equally likely tokens rank by id. The most likely
        token is always kept. The state stays as it is: `commit_tokens` changes it.
        """
        ...

    def map_tokens(self, tokens: Tensor, vocab_map: Tensor, out: Tensor) -> None:
        """Write out [B,N]: vocab_map[tokens[b,n]], or -1 where tokens [B,N] has -1."""
        ...

    def count_tokens(self, tokens: Tensor, offered: Tensor, state: StopState, counts: Tensor) -> None:
        """Write counts [B]: how many of the first offered[b] of tokens [B,N] the sequence takes.

        At most tokens_left, and none after the first of stop_ids. tokens_left falls by the count; after a
        stop token it is 0, or 1 after the sequence's trigger_token: one more step writes the KV row of that
        token.
        """
        ...

    def commit_tokens(
        self, sampled: Tensor, tokens: Tensor, counts: Tensor, state: SamplingState, last_tokens: Tensor
    ) -> None:
        """Take the first counts[b] tokens of a step into the answers: `seen`, `position`, `last_tokens` [B].

        sampled [B,N]: as places among the logits, -1 is not marked as seen; tokens [B,N]: as token ids. Where
        counts[b] is 0 nothing changes.
        """
        ...

    def commit_rows(self, lengths: Tensor, counts: Tensor) -> None:
        """Lengths [B] += counts [B]: the KV rows behind each length that are valid from now on."""
        ...

    def log_probabilities(self, logits: Tensor, tokens: Tensor, top_ids: Tensor, top_values: Tensor) -> None:
        """Log-probabilities of logits [B,N,V] as they are (no penalty, temperature 1), natural logarithm.

        top_ids, top_values [B,N,K+1]: the K most likely tokens in falling order, then `tokens[b,n]`. A row
        whose token is -1 may hold anything.
        """
        ...

    def euler_step(self, x: Tensor, velocity: Tensor, dt: float) -> None:
        """X += dt * velocity."""
        ...
