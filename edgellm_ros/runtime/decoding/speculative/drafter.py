# SPDX-License-Identifier: Apache-2.0
"""Drafter: the protocol of what proposes trees of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from edgellm_ros.engine.executor import BoundRun
from edgellm_ros.engine.packed_arrays import Fields
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DraftTree
from edgellm_ros.runtime.batch.linear_kv_cache import LinearKVCache
from edgellm_ros.runtime.batch.row_state import RowState
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.engines.prompt_inputs import PromptRun


class Drafter(RowState, Protocol):
    """Proposes likely continuations of the first B rows of a batch.

    The drafter is state per row, as `RowState` describes. The tokens of a step come through `accepted`, so
    `commit` does nothing. Only queues work on the device.

    A round is `propose`, and `accepted` after the base model's run on the tree. A round may be recorded as a
    graph: these calls take no input from the host, and they are not made when the graph is replayed. What the
    host knows of the drafter's state is changed by `resume` before every round and by `drafted` after it.
    """

    name: str

    @property
    def kv_cache(self) -> LinearKVCache | None:
        """KV cache of a draft head; prefix reuse copies its rows too."""
        ...

    def clear_row(self, row: int) -> None:
        """Zero a row of the buffers that a failed run may have filled with NaN."""
        ...

    def prompt_fields(self, batch: int, tokens: int) -> Fields:
        """Return the arrays of B prompts of S tokens that `write_prompts` writes."""
        ...

    def write_prompts(
        self,
        arrays: Mapping[str, np.ndarray],
        sequences: Sequence[GenerationSequence],
        rows: range,
        part: Sequence[range],
    ) -> None:
        """Write what `prefilled` needs of a part of prompts, in every run before it.

        part [B]: the tokens of each prompt; the parts of a prompt follow one another, and all prompts end in
        the same run. What the host knows of the drafter's state is changed here.
        """
        ...

    def prefilled(self, run: PromptRun, embeds: Tensor, inputs: Mapping[str, Tensor]) -> list[BoundRun]:
        """Take note of prompts of which the base model has just run a part.

        embeds [B,S,H]: their input embeddings, padded at the end; inputs: the arrays of `write_prompts` and
        `PromptInputs`, on the device. May be recorded as a graph; returns the runs of engines.
        """
        ...

    def propose(self, tree: DraftTree) -> None:
        """Write a tree [B,M] for each row; node 0 is the newest token."""
        ...

    def resume(self, batch: int) -> None:
        """Prepare the first rows for a round, recorded or not."""
        ...

    def drafted(self, batch: int, size: int) -> None:
        """Take note of a queued round of the first rows, recorded or not.

        size: nodes of a tree.
        """
        ...

    def bind(self, batch: int) -> list[BoundRun]:
        """Bind the engines to the tensors of `propose`; return each of their runs once."""
        ...

    def bind_acceptance(self, batch: int, nodes: int) -> list[BoundRun]:
        """Bind the engines to the tensors of `accepted`; return each of their runs once.

        nodes: of each row, in the verification before.
        """
        ...

    def started(self, rows: range, tokens: Tensor, counts: Tensor) -> None:
        """Take note of the first tokens [b,1] of admitted rows, which have been committed."""
        ...

    def accepted(self, tokens: Tensor, path: Tensor, counts: Tensor) -> None:
        """Take note of the first counts[b] of tokens [B,n], which have been committed.

        Rows with a count of 0 are held or closed; held ones go on as they were before the step.
        path [B,n]: the token of the base model's last run whose logits they were sampled from. n is 1 after a
        vanilla step.
        """
        ...
