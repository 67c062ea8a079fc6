# SPDX-License-Identifier: Apache-2.0
"""DecodeMethod: the protocol of decode methods, one file or folder per method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.batch.step_result import StepResult


class DecodeMethod(Protocol):
    """Yields up to `tokens_per_step` tokens per row and step, at least one.

    A step writes KV rows after the committed ones and offers tokens. The step counts the accepted tokens
    (`SamplingRows.count`) and commits them to every state of the batch (`Batch.commit`). All of this is
    queued without waiting for the device.
    """

    tokens_per_step: int

    def prefilled(self, rows: range) -> None:
        """Take note of the first tokens of admitted rows.

        The tokens have been sampled and committed.
        """
        ...

    def begin(self, batch: Batch) -> None:
        """Prepare for steps of `batch.stepping`; called after each change of the batch."""
        ...

    def queue(self, room: int) -> StepResult:
        """Queue one step of the batch; return its result.

        room: slots of each row after those that queued steps may commit, at least 1; the most KV rows that
        the step may write.
        """
        ...

    def queues_ahead(self, sequences: Sequence[GenerationSequence]) -> bool:
        """Return whether the next step may be queued before the last one is delivered.

        The last one is the step of these sequences.
        """
        ...

    def delivered(self, result: StepResult, served: Sequence[tuple[GenerationSequence, int]]) -> None:
        """Take note of a delivered step.

        served: sequences that were still decoding, with their tokens.
        """
        ...

    def capture(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Record the steps with each of these adapters as graphs, for all batch sizes.

        The batch must be empty. False if this is not possible: then steps run without a graph.
        """
        ...

    def clear(self) -> None:
        """Drop all recorded steps: the sampler has other buffers."""
        ...

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop the recorded steps of a removed adapter."""
        ...
