# SPDX-License-Identifier: Apache-2.0
"""The node `edgellm_play` around a Player.

    ~/speech (AudioChunk) --> Player (own thread) --> sound card, or WAV file

A chunk without data stops the sound at once. The callback never waits: sound that finds the buffer full is
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile

from edgellm_ros.msg import AudioChunk
from edgellm_ros.multimodal.audio.pcm import PcmFormat, to_int16
from edgellm_ros.ros.lifecycle import Stop, run_process, spin_once
from edgellm_ros.ros.messaging import check_qos_overrides, overridable
from edgellm_ros.ros.parameter_table import Spec, declare, value_problem
from edgellm_ros.voice.player import DEFAULT_DEVICE, Player, Sink, SoundCard, WavSink

CHUNKS = QoSProfile(depth=100)
LOG_EVERY_S = 1.0
DRAIN_S = 1.0  # of sound that waits when the node ends
SPIN_S = 0.2  # after which a request to end is seen
NO_DEVICE = "none"
SPECS: dict[str, Spec] = {
    "device": Spec(
        DEFAULT_DEVICE,
        "Sound card, by a part of its name; default = the system's, none = use the file.",
        read_only=True,
    ),
    "file": Spec(
        "", "WAV file to write where there is no sound card, or with device = none.", read_only=True
    ),
    "max_buffer": Spec(
        10.0, "Longest sound in seconds that waits to be played; more is dropped.", 0.2, 600.0, read_only=True
    ),
}


class PlayNode(Node):
    """The node; docs/speech.md describes it."""

    def __init__(self, **kwargs: Any) -> None:
        """Open the output and subscribe; `kwargs` are for Node.

        ValueError if there is neither a sound card nor a file to write.
        """
        super().__init__("edgellm_play", **kwargs)
        declare(self, SPECS, value_problem)
        check_qos_overrides(self)
        self.player = Player(self._open(), self.get_parameter("max_buffer").value, self._log)
        self.create_subscription(AudioChunk, "~/speech", self._on_chunk, **overridable(CHUNKS))

    def destroy_node(self) -> None:
        """Play what waits, for at most a second, and end the output."""
        player = getattr(self, "player", None)  # none if the output could not be opened
        if player is not None:
            player.close(DRAIN_S)
        super().destroy_node()

    def _open(self) -> Sink:
        device, file = (self.get_parameter(name).value for name in ("device", "file"))
        problem = "parameter device is none"
        if device != NO_DEVICE:
            try:
                return SoundCard(device)
            except OSError as error:
                problem = str(error)
        if not file:
            raise ValueError(f"{problem}, and parameter file is empty: set it to the WAV file to write")
        self.get_logger().info(f"writing {file}: {problem}")
        return WavSink(file)

    def _on_chunk(self, message: AudioChunk) -> None:
        if not len(message.data):
            self.player.silence()
            return
        try:
            pcm = PcmFormat(message.encoding, message.sample_rate, message.channels)
            samples = to_int16(pcm.decode(message.data))
        except ValueError as error:
            self._log(f"~/speech: {error}")
            return
        if not self.player.add(samples, message.sample_rate):
            self._log(f"the buffer is full: {len(samples) / message.sample_rate:.2f} s of sound are dropped")

    def _log(self, problem: str) -> None:
        self.get_logger().error(problem, throttle_duration_sec=LOG_EVERY_S)


def run(args: Sequence[str] | None = None) -> int:
    """Run the node until a signal comes, and return the exit code.

    `args` as on the command line.
    """
    return run_process("play_node", PlayNode, _run, args)


def _run(node: PlayNode, executor: SingleThreadedExecutor, stop: Stop) -> None:
    while not stop.requested:
        spin_once(node, executor, SPIN_S)
