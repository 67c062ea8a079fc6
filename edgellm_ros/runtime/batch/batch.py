# SPDX-License-Identifier: Apache-2.0
"""Batch: sequences that are decoded together, and the only owner of row order.

A sequence is admitted after the other rows, at any time between two steps. When a sequence is evicted, the
rows after it move up, so that the active rows are always the first ones:

  a  b  c  d        evict b:  a  c  d        admit e:  a  c  d  e
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.row_state import RowState
from edgellm_ros.runtime.batch.sequence import GenerationSequence


class Batch:
    """Sequences by row.

    - states: state per row that a prefill needs
    - of_answers: state per row that only an answer needs: it is opened while the device computes the prompts
    """

    def __init__(
        self, states: Sequence[RowState], max_size: int, of_answers: Sequence[RowState] = ()
    ) -> None:
        self.max_size = max_size
        self.sequences: list[GenerationSequence] = []
        self._of_prompts, self._of_answers = tuple(states), tuple(of_answers)
        self._states = (*self._of_prompts, *self._of_answers)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def index_mapping(self) -> list[int]:
        """Index of each row's request in the list given to `handle_request`."""
        return [sequence.request_index for sequence in self.sequences]

    def admit(self, sequences: Sequence[GenerationSequence]) -> range:
        """Open a row for each sequence after the active rows; return the new rows.

        `begin_answers` opens the rest of the state. ValueError if the batch has no room for all sequences:
        then no sequence is admitted.
        """
        first, last = len(self), len(self) + len(sequences)
        if last > self.max_size:
            raise ValueError(f"a batch of {last} sequences; this engine takes at most {self.max_size}")
        for row, sequence in enumerate(sequences, first):
            for state in self._of_prompts:
                state.open(row, sequence)
            self.sequences.append(sequence)
        return range(first, last)

    def begin_answers(self, rows: range) -> None:
        """Open the state of answers in admitted rows."""
        for row in rows:
            for state in self._of_answers:
                state.open(row, self.sequences[row])

    def evict(self, leaving: Sequence[GenerationSequence]) -> None:
        """Remove sequences; the rows after them move up, in the same order.

        No step may be queued. ValueError if a sequence is not in the batch: then no sequence is removed.
        """
        gone = {self.row_of(sequence) for sequence in leaving}
        staying = [row for row in range(len(self)) if row not in gone]
        for target, source in enumerate(staying):
            if source != target:
                for state in self._states:
                    state.move(source, target)
        size = len(self)
        self.sequences = [self.sequences[row] for row in staying]
        self._close(range(len(staying), size))

    def row_of(self, sequence: GenerationSequence) -> int:
        """Return the row of a sequence. ValueError if it is not in the batch."""
        for row, active in enumerate(self.sequences):
            if active is sequence:
                return row
        raise ValueError("the sequence is not in the batch")

    def commit(self, counts: Tensor) -> None:
        """Queue that row b of a step has yielded counts[b] tokens, in every state."""
        for state in self._states:
            state.commit(counts)

    def clear(self) -> None:
        """Remove all sequences."""
        size = len(self)
        self.sequences = []
        self._close(range(size))

    def _close(self, rows: range) -> None:
        for row in rows:
            for state in self._states:
                state.close(row)
