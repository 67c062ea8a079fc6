# SPDX-License-Identifier: Apache-2.0
"""Pairs commands with camera frames; each pair is planned once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edgellm_ros.echo import quoted
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.node.sensors.input_time import Frame


@dataclass(frozen=True)
class Command:
    """A command to the robot, as text or as a spoken utterance.

    Without text and sound it is the empty command. Typed commands are equal if their texts are equal; every
    utterance is a new command.
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


class Pair(NamedTuple):
    """What is planned together."""

    command: Command
    frame: Frame | None  # None = planned without a frame
    is_first: bool  # whether it is the first pair of this command


class CommandTrigger:
    """Pairs commands with frames.

    With plan_on "command", every command is paired once: with the newest frame, or with the next frame if
    none has arrived. With "image", a command is paired with the newest frame and every later frame until
    another command, or an empty one, replaces the command. Without `needs_frame` (no vision encoder) a
    command is paired at once, with None.
    """

    def __init__(self, plan_on: str, needs_frame: bool = True) -> None:
        self.plan_on = plan_on
        self._needs_frame = needs_frame
        self.frame: Frame | None = None  # the newest that was not refused
        self.refused = ""  # why a newer frame than this one was refused; empty if none was
        self._command = NOTHING
        self._is_paired = False  # whether the command has had its first pair

    def is_new(self, command: Command) -> bool:
        """Tell whether the command has an effect.

        With "image", repeating the current command has none.
        """
        return self.plan_on == "command" or command != self._command

    def on_command(self, command: Command) -> Pair | None:
        """Store a command and return the pair to plan now, if any.

        An empty command removes the current one.
        """
        self._command, self._is_paired = command, False
        return self._pair() if self.frame is not None or not self._needs_frame else None

    def on_frame(self, frame: Frame) -> Pair | None:
        """Store a frame and return the pair to plan now, if any."""
        self.frame, self.refused = frame, ""
        return self._pair()

    def clear(self) -> None:
        """Drop command and frame."""
        self._command, self.frame, self.refused = NOTHING, None, ""

    def _pair(self) -> Pair | None:
        command = self._command
        if not command:
            return None
        if self.plan_on == "command":
            self._command = NOTHING
        pair = Pair(command, self.frame, is_first=not self._is_paired)
        self._is_paired = True
        return pair
