# SPDX-License-Identifier: Apache-2.0
"""Which command is planned with which camera frame. Every pair once, whichever of the two arrives first."""

from __future__ import annotations

from typing import Any


class CommandTrigger:
    """Pairs commands with frames.

    On "command", every command is paired once: with the newest frame, or the first one to come. On "image",
    a command stands until another (or an empty one) replaces it, and is paired with the newest frame and
    every later one.
    """

    def __init__(self, plan_on: str) -> None:
        self.plan_on = plan_on
        self.frame: Any = None
        self._command = ""

    def is_new(self, text: str) -> bool:
        """Whether this command changes anything: on "image", repeating the standing one does not."""
        return self.plan_on == "command" or text != self._command

    def on_command(self, text: str) -> tuple[str, Any] | None:
        """Take a command (empty: none from now on); the pair to plan now, if any."""
        self._command = text
        return self._pair() if self.frame is not None else None

    def on_frame(self, frame: Any) -> tuple[str, Any] | None:
        """Take a frame; the pair to plan now, if any."""
        self.frame = frame
        return self._pair()

    def clear(self) -> None:
        """Forget command and frame."""
        self._command, self.frame = "", None

    def _pair(self) -> tuple[str, Any] | None:
        command = self._command
        if not command:
            return None
        if self.plan_on == "command":
            self._command = ""
        return command, self.frame
