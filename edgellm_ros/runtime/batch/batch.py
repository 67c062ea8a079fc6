# SPDX-License-Identifier: Apache-2.0
"""Batch: sequences that are decoded together, and the only owner of row order.

A sequence is admitted at any time between two steps: after the other rows, or at a row whose sequence then
moves to the end. When a sequence is evicted, another one takes its row, so that the active rows are always
the first ones: the last one of the same adapter, whose row is taken by the last one of the next adapter, and
so on. So sequences of one adapter stay beside each other, and at most one of each moves:

  a  b  c  d        evict b:  a  d  c        admit e:  a  d  c  e        admit f at 1:  a  f  c  e  d

A sequence is held while its prompt is computed, and while it waits for others. A step yields nothing for it,
and is not run for the held sequences at the end:

  a  f  c  e  d     hold c, d:  a  f  (c)  e | (d)        gather a, f, e:  a  f  e | (c)  (d)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.batch.row_state import AnswerState, RowState
from edgellm_ros.runtime.batch.sequence import GenerationSequence


class Batch:
    """Sequences by row.

    - states: state per row that a prefill needs
    - of_answers: state per row that only an answer needs: it is opened while the device computes the prompts
    """

    def __init__(
        self, states: Sequence[RowState], max_size: int, of_answers: Sequence[AnswerState] = ()
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

    @property
    def stepping(self) -> list[GenerationSequence]:
        """The sequences of the rows of a step: up to the last one that is not held."""
        rows = [row for row, sequence in enumerate(self.sequences) if not sequence.held]
        return self.sequences[: rows[-1] + 1] if rows else []

    def place_of(self, newcomer: GenerationSequence) -> int:
        """Return the row for a new sequence: beside others of its adapter in steps."""
        going = self.stepping
        alike = [row for row, sequence in enumerate(going) if sequence.adapter is newcomer.adapter]
        return alike[-1] + 1 if alike else len(going)

    def admit(self, sequences: Sequence[GenerationSequence], at: int | None = None) -> range:
        """Open a row for each sequence; return the new rows.

        at: the first of these rows, None = after the active rows; the sequences there move to the end. The
        new sequences are held until `begin_answers`, which opens the rest of the state. No step may be
        queued. ValueError if the batch has no room for all sequences: then no sequence is admitted.
        """
        size, count = len(self), len(sequences)
        if size + count > self.max_size:
            raise ValueError(
                f"a batch of {size + count} sequences; this engine takes at most {self.max_size}"
            )
        first = size if at is None else at
        rows, moved = range(first, first + count), min(count, size - first)
        for source in range(first, first + moved):
            for state in self._states:
                state.move(source, size + count - moved + source - first)
        staying = self.sequences[first + moved :]
        self.sequences[first:] = [*sequences, *staying, *self.sequences[first : first + moved]]
        for row, sequence in zip(rows, sequences, strict=True):
            sequence.held = True
            for state in self._of_prompts:
                state.open(row, sequence)
            if row < size:
                for state in self._of_answers:
                    state.close(row)
        return rows

    def begin_answers(self, rows: range) -> None:
        """Open the state of answers in admitted rows."""
        for row in rows:
            self.sequences[row].held = False
            for state in self._of_answers:
                state.open(row, self.sequences[row])

    def hold(self, sequence: GenerationSequence) -> None:
        """Let steps yield nothing for a sequence, until `resume`; no step may be queued."""
        row, sequence.held = self.row_of(sequence), True
        for state in self._of_answers:
            state.close(row)

    def resume(self, sequence: GenerationSequence) -> None:
        """Undo `hold`."""
        row, sequence.held = self.row_of(sequence), False
        for state in self._of_answers:
            state.resume(row, sequence)

    def gather(self, wanted: Sequence[GenerationSequence]) -> None:
        """Move these sequences to the first rows; without effect in a full batch.

        No step may be queued.
        """
        free, count = len(self), len(wanted)
        if free == self.max_size:
            return
        wanted_rows = {self.row_of(sequence) for sequence in wanted}
        others = [row for row in range(count) if row not in wanted_rows]
        late = sorted(row for row in wanted_rows if row >= count)
        for one, other in zip(others, late, strict=True):
            for state in self._states:
                for source, target in ((one, free), (other, one), (free, other)):
                    state.move(source, target)
            self.sequences[one], self.sequences[other] = self.sequences[other], self.sequences[one]
        if others:
            self._close(range(free, free + 1))

    def evict(self, leaving: Sequence[GenerationSequence]) -> None:
        """Remove sequences; others take their rows.

        No step may be queued. ValueError if a sequence is not in the batch: then no sequence is removed.
        """
        gone, size = sorted({self.row_of(sequence) for sequence in leaving}, reverse=True), len(self)
        for free in gone:
            while (last := self._last_alike(free)) > free:
                for state in self._states:
                    state.move(last, free)
                self.sequences[free], free = self.sequences[last], last
            self.sequences.pop()
        self._close(range(len(self), size))

    def _last_alike(self, free: int) -> int:
        """Return the last row of those after `free` that are alike; without any, `free`.

        Alike are rows of one adapter that are held, or those that are not.
        """
        kinds = [(sequence.adapter, sequence.held) for sequence in self.sequences[free + 1 :]]
        alike = itertools.takewhile(lambda kind: kind == kinds[0], kinds)
        return free + sum(1 for _ in alike)

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
