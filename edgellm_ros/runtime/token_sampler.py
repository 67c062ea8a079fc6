# SPDX-License-Identifier: Apache-2.0
"""TokenSampler: logits of a batch to one token for each sequence, each by its own request's rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import Kernels, SamplingState
from edgellm_ros.runtime.request import MAX_LOGPROBS
from edgellm_ros.runtime.sequence import GenerationSequence

NO_LOGIT = -1


class TokenSampler:
    """Owns the sampling state of a batch and the drawn tokens, which stay on the device.

    Row i of everything belongs to sequence i of the batch. Sampling knows only the tokens that have logits:
    with a `vocab_map` [V] int64, logit j is that of token vocab_map[j].
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        max_batch_size: int,
        vocab_size: int,
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
        self._tokens = device.zeros((max_batch_size,), np.int64)
        self._drawn = self._tokens if vocab_map is None else device.zeros((max_batch_size,), np.int64)
        self._top_ids = device.zeros((max_batch_size, MAX_LOGPROBS + 1), np.int64)
        self._top_values = device.zeros((max_batch_size, MAX_LOGPROBS + 1), np.float32)

    def begin(self, sequences: Sequence[GenerationSequence]) -> None:
        """Take the sampling parameters and prompts of a new batch."""
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

    def evict(self, index: int, last: int) -> None:
        """Sequence `index` leaves the batch, and those after it, up to `last`, move up by one."""
        for tensor in (*vars(self._state).values(), self._tokens):
            for i in range(index, last):
                self._device.copy(tensor.rows(i, i + 1), tensor.rows(i + 1, i + 2))

    def tokens(self, batch: int) -> Tensor:
        """The tokens [batch] that were drawn last, on the device."""
        return self._tokens.rows(0, batch)

    def draw(self, logits: Tensor, sequences: Sequence[GenerationSequence]) -> None:
        """Draw from logits [B,1,V] and hand each sequence its token.

        EngineError if the logits of a sequence are not finite.
        """
        drawn, tokens = (buffer.rows(0, len(sequences)) for buffer in (self._drawn, self._tokens))
        self._kernels.sample(logits, self._state, drawn)
        if self._vocab_map is not None:
            self._kernels.map_tokens(drawn, self._vocab_map, tokens)
        if any(sequence.request.logprobs for sequence in sequences):
            self._take_logprobs(logits, drawn, sequences)
        for row, token in enumerate(self._device.download(tokens).tolist()):
            if token < 0:
                raise EngineError(
                    f"logits are not finite at token {len(sequences[row].generated)} of the answer"
                )
            sequences[row].accept(token)

    def _take_logprobs(self, logits: Tensor, drawn: Tensor, sequences: Sequence[GenerationSequence]) -> None:
        width = 1 + max(sequence.request.logprobs for sequence in sequences)
        top_ids, top_values = (
            buffer.view(len(sequences), width) for buffer in (self._top_ids, self._top_values)
        )
        self._kernels.log_probabilities(logits, drawn, top_ids, top_values)
        ids, values = self._token_of_logit[self._device.download(top_ids)], self._device.download(top_values)
        for row, sequence in enumerate(sequences):
            if sequence.request.logprobs and not sequence.finish_reason:
                sequence.take_logprobs(ids[row].tolist(), values[row].tolist())
