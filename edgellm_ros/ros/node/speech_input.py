# SPDX-License-Identifier: Apache-2.0
"""~/audio to commands: what is heard, what was wrong with it, and what is told of it.

What is said depends on the messages and their stamps alone; the clock is only asked whether it is too late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rclpy.clock import Clock
from rclpy.impl.rcutils_logger import RcutilsLogger
from std_msgs.msg import Header

from edgellm_ros.msg import AudioChunk
from edgellm_ros.multimodal.sound_stream import SoundStream, Utterance
from edgellm_ros.multimodal.utterance import MAX_LENGTH, STREAM_END
from edgellm_ros.multimodal.voice_activity import VoiceActivity
from edgellm_ros.ros.node.command_trigger import Command
from edgellm_ros.ros.node.messages import to_audio_chunk, to_nanoseconds
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.parameters import Parameters

LOG_THROTTLE_S = 1.0
PROBLEM_S = 5.0  # how long a problem stays on /diagnostics: one piece among good ones would not be seen


def audio_type(transport: str) -> type:
    """The message type of ~/audio. ValueError if audio_common_msgs is asked for and not installed."""
    if transport == "chunk":
        return AudioChunk
    try:
        from audio_common_msgs import msg
    except ImportError:
        raise ValueError(
            f"audio_transport is {transport}, but the package audio_common_msgs is not installed"
        ) from None
    return msg.AudioData if transport == "audio_data" else msg.AudioDataStamped


class Hearing:
    """One microphone of the node. `parameters` is replaced by the node when they change.

    `voice` is None if the engine has no audio encoder: then sound is counted and refused.
    """

    def __init__(
        self,
        voice: VoiceActivity | None,
        parameters: Parameters,
        metrics: NodeMetrics,
        clock: Clock,
        publish: Callable[[AudioChunk], None],
        logger: RcutilsLogger,
    ) -> None:
        self._parameters = parameters
        self._stream = SoundStream(voice, parameters.utterance) if voice is not None else None
        self._metrics = metrics
        self._clock = clock
        self._publish = publish
        self._logger = logger
        self._problem, self._problem_until = "", 0.0

    @property
    def parameters(self) -> Parameters:
        """What the node's parameters are."""
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: Parameters) -> None:
        self._parameters = parameters
        if self._stream is not None:
            self._stream.settings = parameters.utterance

    @property
    def problem(self) -> str:
        """What was wrong with the sound lately; empty if nothing."""
        return self._problem if time.monotonic() < self._problem_until else ""

    @property
    def dropped(self) -> int:
        """Noises that had too little speech in them, so far."""
        return self._stream.dropped if self._stream is not None else 0

    def on_message(self, message: Any) -> list[Command]:
        """What was said and ends with this piece of sound."""
        self._metrics.sound.tick()
        self._metrics.count("audio_received")
        try:
            if self._stream is None:
                raise ValueError("this engine has no audio encoder, sound is not used")
            return self._commands(self._stream.add(*self._read(message)))
        except ValueError as error:
            self._refuse("audio_refused", str(error))
            return []

    def on_stamp(self, header: Header) -> list[Command]:
        """What was said and ends because another sensor is far ahead of a microphone that fell silent."""
        if self._stream is None:
            return []
        return self._commands(self._stream.time_passed(to_nanoseconds(header.stamp)))

    def clear(self) -> None:
        """Forget what was heard."""
        if self._stream is not None:
            self._stream.forget()
        self._problem_until = 0.0

    def _read(self, message: Any) -> tuple[str, int, int, Any, int]:
        """Encoding, rate, channels, data and stamp (ns) of a message of any of the types."""
        header = getattr(message, "header", None)
        stamp = to_nanoseconds(header.stamp) if header is not None else 0
        if isinstance(message, AudioChunk):
            return message.encoding, message.sample_rate, message.channels, message.data, stamp
        pcm = self._parameters.audio_data
        data = message.audio.data if header is not None else message.data
        return pcm.encoding, pcm.sample_rate, pcm.channels, data, stamp

    def _commands(self, utterances: list[Utterance]) -> list[Command]:
        return [Command(sound=utterance.sound) for utterance in utterances if self._is_heard(utterance)]

    def _is_heard(self, utterance: Utterance) -> bool:
        self._metrics.count("utterances")
        if utterance.reason == MAX_LENGTH:
            self._metrics.count("utterances_cut")
            self._logger.warning(
                f"~/audio: cut off after {utterance.sound.seconds:.1f} s (parameter utterance.max_length)"
            )
        limit = self._parameters.max_input_age
        if utterance.reason == STREAM_END:
            limit += self._stream.patience
        age = (self._clock.now().nanoseconds - utterance.until) * 1e-9 if utterance.until else 0.0
        if age > limit:
            self._refuse(
                "utterances_stale",
                f"an utterance is {age:.2f} s old, limit {limit:g} s (parameter max_input_age)",
            )
            return False
        self._publish(to_audio_chunk(utterance))
        return True

    def _refuse(self, counter: str, problem: str) -> None:
        self._metrics.count(counter)
        self._problem, self._problem_until = problem, time.monotonic() + PROBLEM_S
        self._logger.error(f"~/audio: {problem}", throttle_duration_sec=LOG_THROTTLE_S)
