# SPDX-License-Identifier: Apache-2.0
"""Which command is planned with which camera frame. Every pair once, whichever of the two arrives first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.multimodal.sound import Sound


@dataclass(frozen=True)
class Command:
    """What the robot is told: typed text, or a sound in which it is spoken. Without either, it is empty.

    Two typed commands are equal if their texts are; what is spoken is never equal to what was spoken before.
    """

    text: str = ""
    sound: Sound | None = None

    def __bool__(self) -> bool:
        return bool(self.text) or self.sound is not None

    def __str__(self) -> str:
        return (
            f"command {quoted(self.text)}"
            if self.sound is None
            else f"utterance of {self.sound.seconds:.1f} s"
        )


NOTHING = Command()


class CommandTrigger:
    """Pairs commands with frames.

    On "command", every command is paired once: with the newest frame, or the first one to come. On "image",
    a command stands until another (or an empty one) replaces it, and is paired with the newest frame and
    every later one.
    """

    def __init__(self, plan_on: str) -> None:
        self.plan_on = plan_on
        self.frame: Any = None
        self._command = NOTHING

    def is_new(self, command: Command) -> bool:
        """Whether this command changes anything: on "image", repeating the standing one does not."""
        return self.plan_on == "command" or command != self._command

    def on_command(self, command: Command) -> tuple[Command, Any] | None:
        """Take a command (empty: none from now on); the pair to plan now, if any."""
        self._command = command
        return self._pair() if self.frame is not None else None

    def on_frame(self, frame: Any) -> tuple[Command, Any] | None:
        """Take a frame; the pair to plan now, if any."""
        self.frame = frame
        return self._pair()

    def clear(self) -> None:
        """Forget command and frame."""
        self._command, self.frame = NOTHING, None

    def _pair(self) -> tuple[Command, Any] | None:
        command = self._command
        if not command:
            return None
        if self.plan_on == "command":
            self._command = NOTHING
        return command, self.frame
