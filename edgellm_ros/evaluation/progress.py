# SPDX-License-Identifier: Apache-2.0
"""The progress of an evaluation: a bar on a terminal, some lines elsewhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 30  # of the bar, in characters
EVERY_S = 30.0  # between two lines in a log


class Progress:
    """Writes to `file`, which is standard error in the command."""

    def __init__(
        self, file: TextIO, total: int, finished: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`finished`: items that an earlier evaluation has finished."""
        self._file, self._total, self._finished = file, total, finished
        self._clock = clock
        self._shown = clock()
        self._first: tuple[float, int] | None = None  # when the first item was finished, and which it was
        self._terminal = file.isatty()

    def status(self, text: str) -> None:
        """Show what happens before the first item."""
        if self._terminal:
            self._replace(text)
        else:
            self._file.write(text + "\n")
            self._file.flush()

    def advance(self, text: str) -> None:
        """Count one more item, and describe all of them."""
        self._finished += 1
        now = self._clock()
        self._first = self._first or (now, self._finished)
        line = f"{self._finished} of {self._total}, {text}{self._left(now)}"
        if self._terminal:
            filled = WIDTH * self._finished // self._total
            self._replace(f"[{'#' * filled}{'-' * (WIDTH - filled)}] {line}")
        elif now - self._shown >= EVERY_S or self._finished == self._total:
            self._shown = now
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self._terminal:
            self._file.write("\r\x1b[2K")
            self._file.flush()

    def _left(self, now: float) -> str:
        """Estimate the rest by the items after the first one.

        The time of the first item includes the start of the workers.
        """
        assert self._first is not None
        start, first = self._first
        if self._finished in (first, self._total):
            return ""
        seconds = (now - start) / (self._finished - first) * (self._total - self._finished)
        minutes, rest = divmod(round(seconds), 60)
        return f", {minutes} min {rest} s left" if minutes else f", {rest} s left"

    def _replace(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._file.write("\r\x1b[2K" + text[:width])
        self._file.flush()
