# SPDX-License-Identifier: Apache-2.0
"""TurnLock: a lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading
from collections import deque


class TurnLock:
    """A lock for `with` blocks; not reentrant.

    An ordinary lock may be taken again and again by the thread that has just released it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    @property
    def is_wanted(self) -> bool:
        """Whether another thread waits for the lock."""
        return bool(self._waiting)

    def __enter__(self) -> None:
        with self._mutex:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:  # such as KeyboardInterrupt
            with self._mutex:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self._release()  # the turn had come
            raise

    def __exit__(self, *exception: object) -> None:
        self._release()

    def _release(self) -> None:
        """Pass the lock on to the thread that has waited longest."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
