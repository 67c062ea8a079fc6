# SPDX-License-Identifier: Apache-2.0
"""DecodeMethod: what yields the tokens of a batch, step by step. One file or folder for each method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgellm_ros.runtime.batch.batch import Batch
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.lora import LoraAdapter


class DecodeMethod(Protocol):
    """Yields one or more tokens per row and step. `tokens_per_step`: the most of one row.

    A step writes KV rows behind the committed ones, offers tokens, and commits as many as count to every
    state of the batch (`SamplingRows.count`, `Batch.commit`), all without waiting for the device.
    """

    tokens_per_step: int

    def begin(self, batch: Batch) -> None:
        """Prepare for steps of these sequences: called after each change of the batch."""
        ...

    def queue(self) -> StepResult:
        """Queue one step of the batch; return its tokens on their way to the host."""
        ...

    def capture(self, adapters: Sequence[LoraAdapter]) -> bool:
        """Record the steps with each of these adapters as graphs, for all batch sizes.

        The batch must be empty. False where that is not possible: then steps run without a graph.
        """
        ...

    def drop(self, adapter: LoraAdapter) -> None:
        """Drop what was recorded with an adapter that was removed."""
        ...
