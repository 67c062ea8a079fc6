# SPDX-License-Identifier: Apache-2.0
"""Lines of `edgellm demo`, of which the last one is a status.

On a terminal the status is rewritten in place; elsewhere (a log file, CI) only finished lines are written.
"""

from __future__ import annotations

import shutil
from typing import Any, TextIO

FEW = 3  # up to this number of episodes, every plan has its line


class DemoDisplay:
    """Writes to `file`, which is standard error in the command.

    A subclass has a method `_NAME(event)` for each kind of event.
    """

    def __init__(self, file: TextIO, episodes: int) -> None:
        self._file = file
        self._episodes = episodes
        self._terminal = file.isatty()
        self._won = self._played = 0

    def status(self, text: str) -> None:
        """Show the present state; on a terminal the next line replaces it."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[2K" + text[:width])
        elif not self._played:
            self._write(text + "\n")

    def line(self, text: str) -> None:
        """Show a permanent line."""
        self._write(("\r\x1b[2K" if self._terminal else "") + text + "\n")

    def close(self) -> None:
        """Remove the status line."""
        if self._terminal:
            self._write("\r\x1b[2K")

    def show(self, event: dict[str, Any]) -> None:
        """Show an event of the world."""
        getattr(self, f"_{event['event']}")(event)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
