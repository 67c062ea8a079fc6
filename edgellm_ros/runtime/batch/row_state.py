# SPDX-License-Identifier: Apache-2.0
"""RowState: the protocol of state per row of a batch."""

from __future__ import annotations

from typing import Protocol

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.sequence import GenerationSequence


class RowState(Protocol):
    """State of the sequences of a batch, one row per sequence, such as the KV cache.

    Only `Batch` calls `open`, `move` and `close`, so all states have the same row order. A step may run over
    more rows than the batch has: it has no effect on closed rows.
    """

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Begin a sequence in a row, at any time; the row's old state is no longer needed."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copy the state of row `source` over the state of row `target`."""
        ...

    def close(self, row: int) -> None:
        """End a row: it holds no sequence until it is opened again."""
        ...

    def commit(self, counts: Tensor) -> None:
        """Queue the commit of counts[b] tokens to row b; counts [B] int64."""
        ...


class AnswerState(RowState, Protocol):
    """State that only answers need; a closed row of it takes no tokens."""

    def resume(self, row: int, sequence: GenerationSequence) -> None:
        """Continue the sequence of a row that was closed, as its other state is."""
        ...
