# SPDX-License-Identifier: Apache-2.0
"""Turns ~/audio into commands: cuts it into utterances, reports invalid sound.

With a speech engine the utterances go to it (`listener.py`).

Utterances depend on the messages and their stamps alone; the clock only decides which ones are too old.
"""

from __future__ import annotations

from typing import Any

from rclpy.node import Node
from std_msgs.msg import Header

from edgellm_ros.msg import AudioChunk
from edgellm_ros.multimodal.audio.sound_stream import SoundStream, Utterance
from edgellm_ros.multimodal.audio.utterance import MAX_LENGTH, STREAM_END
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.ros.messaging import to_nanoseconds
from edgellm_ros.ros.node.listener import Listener
from edgellm_ros.ros.node.messages import to_audio_chunk
from edgellm_ros.ros.node.metrics import NodeMetrics, RecentProblem
from edgellm_ros.ros.node.outputs.outputs import Outputs
from edgellm_ros.ros.node.planning.command_trigger import Command
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.speech_output import SpeechOutput

LOG_THROTTLE_S = 1.0


def audio_type(transport: str) -> type:
    """Return the message type of ~/audio.

    ValueError if the type needs audio_common_msgs, which is not installed.
    """
    if transport == "chunk":
        return AudioChunk
    try:
        from audio_common_msgs import msg
    except ImportError:
        raise ValueError(
            f"audio_transport is {transport}, but the package audio_common_msgs is not installed"
        ) from None
    return msg.AudioData if transport == "audio_data" else msg.AudioDataStamped


class SpeechInput:
    """One microphone: turns the sound on ~/audio into spoken commands."""

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        voice: VoiceActivity | None,
        outputs: Outputs,
        metrics: NodeMetrics,
        missing: str = "",
        listener: Listener | None = None,
        robot: SpeechOutput | None = None,
    ) -> None:
        """Start with an empty stream.

        Without `voice` (no audio encoder, for the reason `missing`) sound is counted and refused. With a
        listener utterances go to it, and become commands once they are transcribed. robot: whose voice is not
        listened to.
        """
        self._listener = listener
        self._followed = 0.0  # s of the utterance in progress that the listener has got
        self._missing = missing
        self._robot = robot
        self._parameters = parameters
        self._stream = SoundStream(voice, parameters.current.utterance) if voice is not None else None
        self._outputs = outputs
        self._metrics = metrics
        self._clock = node.get_clock()
        self._logger = node.get_logger()
        self._problem = RecentProblem()

    @property
    def problem(self) -> str:
        """The latest problem with the sound; empty after a few seconds."""
        return self._problem.text

    @property
    def dropped(self) -> int:
        """Number of sounds so far with too little speech for an utterance."""
        return self._stream.dropped if self._stream is not None else 0

    def on_message(self, message: Any) -> list[Command]:
        """Return the commands that end with this message."""
        self._metrics.sound.tick()
        self._metrics.count("audio_received")
        try:
            if self._stream is None:
                raise ValueError(f"{self._missing}: sound is ignored")
            self._stream.settings = self._parameters.current.utterance
            encoding, sample_rate, channels, data, stamp = self._read(message)
            self._check_size(data)
            chunk = encoding, sample_rate, channels, data, stamp
            chunks = [chunk] if self._robot is None else self._robot.pass_on(chunk)
            commands = self._commands([found for each in chunks for found in self._stream.add(*each)])
        except ValueError as error:
            self._refuse("audio_refused", str(error))
            return []
        self._follow()
        return commands

    def on_stamp(self, header: Header) -> list[Command]:
        """Return the commands that a camera frame long after the last sound ends."""
        if self._stream is None:
            return []
        return self._commands(self._stream.time_passed(to_nanoseconds(header.stamp)))

    def silence_robot(self) -> None:
        """Stop the robot's speech: something else was said to it."""
        if self._robot is not None:
            self._robot.stop()

    def clear(self) -> None:
        """Drop the sound received so far."""
        if self._stream is not None:
            self._stream.drop()
        if self._listener is not None:
            self._listener.clear()
        self._problem.clear()

    def _check_size(self, data: Any) -> None:
        try:
            self._parameters.current.limits.check_data("the chunk", [data])
        except ValueError:
            self._stream.drop()  # half a sentence may mean something else
            raise

    def _read(self, message: Any) -> tuple[str, int, int, Any, int]:
        """Return encoding, rate, channels, data and stamp (ns) of a message of any type."""
        header = getattr(message, "header", None)
        stamp = to_nanoseconds(header.stamp) if header is not None else 0
        if isinstance(message, AudioChunk):
            return message.encoding, message.sample_rate, message.channels, message.data, stamp
        pcm = self._parameters.current.audio_data
        data = message.audio.data if header is not None else message.data
        return pcm.encoding, pcm.sample_rate, pcm.channels, data, stamp

    def _commands(self, utterances: list[Utterance]) -> list[Command]:
        accepted = [utterance for utterance in utterances if self._accept(utterance)]
        if self._listener is None:
            return [Command(sound=utterance.sound) for utterance in accepted]
        for utterance in accepted:
            self._listener.add(utterance)
        return []

    def _follow(self) -> None:
        """Give the listener the speech so far.

        Only if there is `hearing.partial_interval` more of it, and the engine is free.
        """
        if self._listener is None or self._stream is None:
            return
        interval = self._parameters.current.hearing.partial_interval
        if not interval:
            return
        so_far = self._stream.so_far()
        seconds = 0.0 if so_far is None else so_far.sound.seconds
        self._followed = min(self._followed, seconds)  # a new utterance is shorter than the last one
        if so_far is not None and seconds - self._followed >= interval and self._listener.idle:
            self._followed = seconds
            self._listener.follow(so_far)

    def _accept(self, utterance: Utterance) -> bool:
        """Count and publish an utterance; False if it is too old."""
        self._metrics.count("utterances")
        if utterance.reason == MAX_LENGTH:
            self._metrics.count("utterances_cut")
            self._logger.warning(
                f"~/audio: cut off after {utterance.sound.seconds:.1f} s (parameter utterance.max_length)"
            )
        limit = self._parameters.current.max_input_age
        if utterance.reason == STREAM_END:
            limit += self._stream.patience
        age = (self._clock.now().nanoseconds - utterance.until) * 1e-9 if utterance.until else 0.0
        if age > limit:
            self._refuse(
                "utterances_stale",
                f"an utterance is {age:.2f} s old, limit {limit:g} s (parameter max_input_age)",
            )
            return False
        self._outputs.publish_utterance(to_audio_chunk(utterance))
        return True

    def _refuse(self, counter: str, problem: str) -> None:
        self._metrics.count(counter)
        self._problem.set(problem)
        self._logger.error(f"~/audio: {problem}", throttle_duration_sec=LOG_THROTTLE_S)
