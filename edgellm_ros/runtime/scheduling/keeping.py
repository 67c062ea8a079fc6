# SPDX-License-Identifier: Apache-2.0
"""Keeping: next turns of answered conversations, computed after the response.

What the next turn of a conversation begins with is computed like a prompt, in parts between steps, in the row
that the answer has left. It is given up if a request needs the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.scheduling.entry import Entry


@dataclass(eq=False)
class NextTurn:
    """The next turn of an answered conversation."""

    answered: GenerationSequence
    slot: int  # of the encoder rows of both
    priority: int
    sequence: GenerationSequence | None = None  # None until it is begun
    parts: Iterator[Any] | None = None


class Keeping:
    """The next turns that are not stored yet."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.turns: list[NextTurn] = []
        self._pipeline = pipeline

    def next_turn(self, running: Sequence[Entry], is_encoding: bool) -> NextTurn | None:
        """Return the next turn that may be computed now.

        Those of a lower priority than that of a request in the batch wait, and those that may need the
        encoders while these have a run (`is_encoding`).
        """
        most = max((entry.priority for entry in running), default=None)
        turns = (turn for turn in self.turns if most is None or turn.priority >= most)
        return next((turn for turn in turns if not is_encoding or turn.sequence is not None), None)

    def compute_part(self, turn: NextTurn, most: int) -> bool:
        """Compute a part of at most `most` tokens.

        Stores the turn after the last part; returns whether it was the last.
        """
        pipeline, batch = self._pipeline, self._pipeline.batch
        if turn.sequence is None:
            found = pipeline.next_turns([turn.answered])
            if not found:
                return True
            turn.sequence = found[0]
            batch.admit(found)
            turn.parts = pipeline.prefills.parts(found, lambda: self._row(turn), most=most)
        assert turn.parts is not None
        _, _, is_last = next(turn.parts)
        if is_last:
            pipeline.store_prefixes([turn.sequence])
            batch.evict([turn.sequence])
        return is_last

    def give_up(self, turn: NextTurn) -> None:
        """Free the row of a turn that is not complete."""
        if turn.sequence is not None and turn.sequence in self._pipeline.batch.sequences:
            self._pipeline.batch.evict([turn.sequence])

    def _row(self, turn: NextTurn) -> range:
        assert turn.sequence is not None
        row = self._pipeline.batch.row_of(turn.sequence)
        return range(row, row + 1)
