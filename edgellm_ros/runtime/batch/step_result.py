# SPDX-License-Identifier: Apache-2.0
"""StepResult: the tokens of one step, while they are copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import HostCopy
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.token_states import TokenStates


@dataclass(slots=True, eq=False)
class StepResult:
    """Up to N tokens per row of a step; the first counts[b] belong to the answer."""

    output: HostCopy  # int64: tokens [B,N], and counts [B] at index `counts_at`
    shape: tuple[int, int]  # B, N
    counts_at: int  # index of the counts in `output`
    logprobs: tuple[HostCopy, HostCopy] | None  # most likely tokens (logit indices) and values [B,N,K+1]
    token_of_logit: np.ndarray  # token id of each logit [V] int64
    states: TokenStates | None = None  # of the tokens, if a request wants them

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens that a row may get."""
        return self.shape[1]

    def deliver(
        self, sequences: Sequence[GenerationSequence], also_held: bool = False
    ) -> list[tuple[GenerationSequence, int]]:
        """Wait for the tokens, and append each row's counted tokens to its sequence.

        sequences: by row, as they were when the step was queued; a sequence that no longer decodes, or is
        held (unless `also_held`), gets no tokens. Returns the other sequences with their counts. EngineError
        if the logits of a counted token are not finite.
        """
        output = self.output.wait().tolist()
        width = self.shape[1]
        likeliest = self._wait_for_logprobs() if self.logprobs is not None else None
        states = self.states.wait() if self.states is not None else None
        served = []
        for row, sequence in enumerate(sequences):
            if not sequence.decoding or (sequence.held and not also_held):
                continue
            count = output[self.counts_at + row]
            served.append((sequence, count))
            for place, token in enumerate(output[row * width : row * width + count]):
                if token < 0:
                    at = len(sequence.generated)
                    raise EngineError(f"logits are not finite at token {at} of the answer")
                if likeliest is not None and sequence.request.logprobs and not sequence.finish_reason:
                    ids, values = likeliest
                    sequence.add_logprobs(ids[row, place].tolist(), values[row, place].tolist())
                wants_states = sequence.request.output_hidden_states and not sequence.finish_reason
                if states is not None and wants_states:
                    sequence.hidden_states.append(states[:, row, place])
                sequence.accept(token)
                if not sequence.decoding:
                    break
        return served

    def _wait_for_logprobs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and log-probabilities [B,N,K+1]."""
        assert self.logprobs is not None
        ids, values = (copy.wait() for copy in self.logprobs)
        return self.token_of_logit[ids], values
