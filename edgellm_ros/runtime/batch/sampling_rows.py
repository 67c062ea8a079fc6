# SPDX-License-Identifier: Apache-2.0
"""TokenSampler: logits of a batch to one token for each sequence, each by its own request's rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import Device, HostCopy
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels, SamplingState, StopState
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.request import MAX_LOGPROBS

NO_LOGIT = -1
NO_TOKEN = -1


@dataclass(frozen=True)
class SampledTokens:
    """What one step drew, on its way to the host: token ids [B], ids and values of logprobs [B,K+1]."""

    tokens: HostCopy
    logprobs: tuple[HostCopy, HostCopy] | None


class TokenSampler:
    """Owns the sampling state of a batch and the drawn tokens, which stay on the device.

    Row i of everything belongs to sequence i of the batch. Sampling knows only the tokens that have logits:
    with a `vocab_map` [V] int64, logit j is that of token vocab_map[j]. After one of `stop_token_ids` no
    decode step counts for a sequence any more, or one that writes the token's keys and values if it announces
    trajectories.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        max_batch_size: int,
        vocab_size: int,
        stop_token_ids: Collection[int],
        vocab_map: np.ndarray | None = None,
    ) -> None:
        self._device = device
        self._kernels = kernels
        output_vocab_size = vocab_size if vocab_map is None else len(vocab_map)
        self._vocab_map: Tensor | None = None
        self._token_of_logit, self._logit_of_token = np.arange(vocab_size), np.arange(vocab_size)
        if vocab_map is not None:
            self._vocab_map = device.empty(vocab_map.shape, np.int64)
            device.upload(self._vocab_map, vocab_map)
            self._token_of_logit, self._logit_of_token = vocab_map, np.full(vocab_size, NO_LOGIT)
            self._logit_of_token[vocab_map] = np.arange(output_vocab_size)
        self._state = SamplingState(
            temperature=device.zeros((max_batch_size,), np.float32),
            top_k=device.zeros((max_batch_size,), np.int64),
            top_p=device.zeros((max_batch_size,), np.float32),
            min_p=device.zeros((max_batch_size,), np.float32),
            repetition_penalty=device.zeros((max_batch_size,), np.float32),
            seed=device.zeros((max_batch_size,), np.uint64),
            step=device.zeros((max_batch_size,), np.int64),
            seen=device.zeros((max_batch_size, output_vocab_size), np.bool_),
        )
        device.upload(self._state.repetition_penalty, np.ones(max_batch_size, np.float32))
        self.stop_state = StopState(
            steps_left=device.zeros((max_batch_size,), np.int64),
            stop_ids=device.empty((max(1, len(stop_token_ids)),), np.int64),
            final_token=device.zeros((max_batch_size,), np.int64),
        )
        device.upload(self.stop_state.stop_ids, np.array([*stop_token_ids] or [NO_TOKEN], np.int64))
        self._tokens = device.zeros((max_batch_size,), np.int64)
        self._token_windows = [self._tokens.rows(0, batch) for batch in range(max_batch_size + 1)]
        self._drawn = self._tokens if vocab_map is None else device.zeros((max_batch_size,), np.int64)
        self._top_ids = device.zeros((max_batch_size, MAX_LOGPROBS + 1), np.int64)
        self._top_values = device.zeros((max_batch_size, MAX_LOGPROBS + 1), np.float32)

    def begin(self, sequences: Sequence[GenerationSequence]) -> None:
        """Take the sampling parameters and prompts of a new batch, from which nothing was drawn yet."""
        batch = len(sequences)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
            target = getattr(self._state, name).rows(0, batch)
            values = [getattr(sequence.request.sampling, name) for sequence in sequences]
            self._device.upload(target, np.array(values, target.dtype))
        self._device.fill_zero(self._state.step)
        seen = np.zeros((batch, self._state.seen.shape[1]), np.bool_)
        for row, sequence in enumerate(sequences):
            logits = self._logit_of_token[sequence.token_ids]
            seen[row, logits[logits != NO_LOGIT]] = True
        self._device.upload(self._state.seen.rows(0, batch), seen)
        steps_left = [sequence.steps_left - 1 for sequence in sequences]  # the first token needs no step
        final = [sequence.action_trigger_token for sequence in sequences]
        for target, numbers in (
            (self.stop_state.steps_left, steps_left),
            (self.stop_state.final_token, [NO_TOKEN if token is None else token for token in final]),
        ):
            self._device.upload(target.rows(0, batch), np.array(numbers, np.int64))

    def evict(self, index: int, last: int) -> None:
        """Sequence `index` leaves the batch, and those after it, up to `last`, move up by one."""
        stops = (self.stop_state.steps_left, self.stop_state.final_token)
        for tensor in (*vars(self._state).values(), *stops, self._tokens):
            for i in range(index, last):
                self._device.copy(tensor.rows(i, i + 1), tensor.rows(i + 1, i + 2))

    def tokens(self, batch: int) -> Tensor:
        """The tokens [batch] that were drawn last, on the device."""
        return self._token_windows[batch]

    def draw(self, logits: Tensor) -> None:
        """Queue that a token is drawn from each row of logits [B,1,V], and whether it is the last."""
        batch = logits.shape[0]
        drawn, tokens = self._drawn.rows(0, batch), self._tokens.rows(0, batch)
        self._kernels.sample(logits, self._state, drawn)
        if self._vocab_map is not None:
            self._kernels.map_tokens(drawn, self._vocab_map, tokens)
        self._kernels.stop_test(tokens, self.stop_state)

    def copy_to_host(self, logits: Tensor, sequences: Sequence[GenerationSequence]) -> SampledTokens:
        """Begin to copy what was drawn from logits [B,1,V] for these sequences to the host."""
        logprobs, most = None, max([sequence.request.logprobs for sequence in sequences])
        if most:
            batch = len(sequences)
            top_ids, top_values = (
                buffer.view(batch, most + 1) for buffer in (self._top_ids, self._top_values)
            )
            self._kernels.log_probabilities(logits, self._drawn.rows(0, batch), top_ids, top_values)
            logprobs = self._device.copy_to_host(top_ids), self._device.copy_to_host(top_values)
        return SampledTokens(self._device.copy_to_host(self.tokens(len(sequences))), logprobs)

    def deliver(self, drawn: SampledTokens, sequences: Sequence[GenerationSequence]) -> None:
        """Wait for what was drawn, and give each sequence that has not ended its token.

        EngineError if the logits of such a sequence are not finite.
        """
        tokens = drawn.tokens.wait().tolist()
        if drawn.logprobs is not None:
            ids, values = (reading.wait() for reading in drawn.logprobs)
        for row, (token, sequence) in enumerate(zip(tokens, sequences, strict=True)):
            if not sequence.decoding:
                continue
            if token < 0:
                raise EngineError(f"logits are not finite at token {len(sequence.generated)} of the answer")
            if sequence.request.logprobs and not sequence.finish_reason:
                sequence.take_logprobs(self._token_of_logit[ids[row]].tolist(), values[row].tolist())
            sequence.accept(token)
