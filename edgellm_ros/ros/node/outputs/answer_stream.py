# SPDX-License-Identifier: Apache-2.0
"""Streams texts of answers, generated side by side, one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable


class AnswerStream:
    """Publishes the pieces of one answer at a time; thread-safe.

    Pieces of another answer wait until this one has ended. Answers are objects that are compared by identity.
    """

    def __init__(self, publish: Callable[[str], None]) -> None:
        self._publish = publish
        self._changing = threading.Lock()
        self._current: object | None = None
        self._waiting: dict[object, str] = {}  # text so far, in the order of the first pieces
        self._ended: set[object] = set()  # those of them that have ended

    def add(self, answer: object, piece: str) -> None:
        """Publish the next piece of an answer, or store it."""
        with self._changing:
            if self._current is None:
                self._current = answer
            if answer is self._current:
                self._publish(piece)
            else:
                self._waiting[answer] = self._waiting.get(answer, "") + piece

    def end(self, answer: object) -> None:
        """End an answer, which may have no pieces; publish what waited for its end."""
        with self._changing:
            if answer is not self._current:
                if answer in self._waiting:
                    self._ended.add(answer)
                return
            self._current = None
            while self._waiting and self._current is None:
                following = next(iter(self._waiting))
                self._publish(self._waiting.pop(following))
                if following in self._ended:
                    self._ended.remove(following)
                else:
                    self._current = following
