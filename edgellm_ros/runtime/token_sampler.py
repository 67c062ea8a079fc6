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


class TokenSampler:
    """Owns the sampling state of a batch and the drawn tokens, which stay on the device."""

    def __init__(self, device: Device, kernels: Kernels, max_batch_size: int, vocab_size: int) -> None:
        self._device = device
        self._kernels = kernels
        self._state = SamplingState(
            temperature=device.zeros((max_batch_size,), np.float32),
            top_k=device.zeros((max_batch_size,), np.int64),
            top_p=device.zeros((max_batch_size,), np.float32),
            min_p=device.zeros((max_batch_size,), np.float32),
            repetition_penalty=device.zeros((max_batch_size,), np.float32),
            seed=device.zeros((max_batch_size,), np.uint64),
            step=device.zeros((max_batch_size,), np.int64),
            seen=device.zeros((max_batch_size, vocab_size), np.bool_),
        )
        self._tokens = device.zeros((max_batch_size,), np.int64)
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
            seen[row, sequence.token_ids] = True
        self._device.upload(self._state.seen.rows(0, batch), seen)

    def draw(self, logits: Tensor, sequences: Sequence[GenerationSequence]) -> Tensor:
        """Draw from logits [B,1,V] and hand each sequence that still decodes its token.

        Returns the tokens [B], on the device. EngineError if the logits of such a sequence are not finite.
        """
        tokens = self._tokens.rows(0, len(sequences))
        self._kernels.sample(logits, self._state, tokens)
        if any(sequence.request.logprobs for sequence in sequences):
            self._take_logprobs(logits, tokens, sequences)
        for row, token in enumerate(self._device.download(tokens).tolist()):
            sequence = sequences[row]
            if sequence.decoding:
                if token < 0:
                    raise EngineError(
                        f"logits are not finite at token {len(sequence.generated)} of the answer"
                    )
                sequence.accept(token)
        return tokens

    def _take_logprobs(self, logits: Tensor, tokens: Tensor, sequences: Sequence[GenerationSequence]) -> None:
        width = 1 + max(sequence.request.logprobs for sequence in sequences)
        top_ids, top_values = (
            buffer.view(len(sequences), width) for buffer in (self._top_ids, self._top_values)
        )
        self._kernels.log_probabilities(logits, tokens, top_ids, top_values)
        ids, values = self._device.download(top_ids), self._device.download(top_values)
        for row, sequence in enumerate(sequences):
            if sequence.request.logprobs and not sequence.finish_reason:
                sequence.take_logprobs(ids[row].tolist(), values[row].tolist())
