# SPDX-License-Identifier: Apache-2.0
"""StepResult: the tokens of one step, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import HostCopy
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.batch.sequence import GenerationSequence


@dataclass(frozen=True)
class StepResult:
    """What a step yields for each row: up to N tokens, of which counts[b] belong to its answer."""

    output: HostCopy  # int64: tokens [B,N], from `counts_at` on counts [B]
    shape: tuple[int, int]  # B, N
    counts_at: int
    logprobs: tuple[HostCopy, HostCopy] | None  # ids (as places among the logits) and values [B,N,K+1]
    token_of_logit: np.ndarray  # [V] int64

    def deliver(self, sequences: Sequence[GenerationSequence]) -> list[GenerationSequence]:
        """Wait for the tokens of a decode step; return the sequences that were still decoding.

        Each of these gets its tokens, and its KV rows are committed on the host too. sequences [B]: by row
        when the step was queued. EngineError if the logits of a token that counts are not finite.
        """
        served = {row: sequence for row, sequence in enumerate(sequences) if sequence.decoding}
        counts = self._deliver(sequences)
        for row, sequence in served.items():
            sequence.kv_length += counts[row]
            sequence.steps += 1
        return list(served.values())

    def deliver_first(self, sequences: Sequence[GenerationSequence]) -> None:
        """Wait for the first tokens of sequences whose prompts were just read; EngineError as above."""
        for sequence in sequences:
            sequence.kv_length = len(sequence.token_ids)
        self._deliver(sequences)

    def _deliver(self, sequences: Sequence[GenerationSequence]) -> list[int]:
        """Give each sequence its tokens; return the counts."""
        output = self.output.wait()
        batch, width = self.shape
        tokens = output[: batch * width].reshape(batch, width).tolist()
        counts = output[self.counts_at : self.counts_at + batch].tolist()
        likeliest = None
        if self.logprobs is not None:
            ids, values = (copy.wait() for copy in self.logprobs)
            likeliest = self.token_of_logit[ids], values
        for row, sequence in enumerate(sequences):
            if not sequence.decoding:
                continue
            for place, token in enumerate(tokens[row][: counts[row]]):
                if token < 0:
                    at = len(sequence.generated)
                    raise EngineError(f"logits are not finite at token {at} of the answer")
                if likeliest is not None and sequence.request.logprobs and not sequence.finish_reason:
                    top_ids, top_values = (part[row, place].tolist() for part in likeliest)
                    sequence.add_logprobs(top_ids, top_values)
                sequence.accept(token)
                if not sequence.decoding:
                    break
        return counts
