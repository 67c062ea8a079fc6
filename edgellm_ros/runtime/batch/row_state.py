# SPDX-License-Identifier: Apache-2.0
"""RowState: what is kept for each row of a batch, and the verbs by which it changes."""

from __future__ import annotations

from typing import Protocol

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.sequence import GenerationSequence


class RowState(Protocol):
    """State of every sequence of a batch, a row each: KV cache, sampling, later recurrent state.

    `Batch` alone calls `open`, `move` and `close`, so all states have the same row order. A closed row takes
    part in a step of more rows than the batch has, without any effect.
    """

    def open(self, row: int, sequence: GenerationSequence) -> None:
        """Begin a sequence in a row, at any time; what the row held before is no longer needed."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copy the state of row `source` to row `target`, whose own is no longer needed."""
        ...

    def close(self, row: int) -> None:
        """End a row: it holds no sequence until it is opened again."""
        ...

    def commit(self, counts: Tensor) -> None:
        """Queue that row b of a step has yielded counts[b] tokens; counts [B] int64 on the device."""
        ...
