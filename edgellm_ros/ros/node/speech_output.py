# SPDX-License-Identifier: Apache-2.0
"""Speaks answers on ~/speech, and keeps the robot's own voice out of ~/audio."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rclpy.node import Node
from std_msgs.msg import Header

from edgellm_ros.msg import AudioChunk
from edgellm_ros.multimodal.audio.pcm import PcmFormat
from edgellm_ros.multimodal.audio.voice_activity import VoiceActivity
from edgellm_ros.ros.messaging import to_time
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.outputs.outputs import Outputs
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.parameters import Parameters
from edgellm_ros.voice.echo_gate import QUIETEST, EchoGate, Hearing
from edgellm_ros.voice.speaker import Speaker
from edgellm_ros.voice.voice import Voice, open_voice

HELD_S = 0.6  # sound before a barge-in was noticed, which has the beginning of what the person says
LOG_THROTTLE_S = 1.0
SoundChunk = tuple[str, int, int, Any, int]  # encoding, rate, channels, data, stamp in ns


def open_robots_voice(parameters: Parameters) -> Voice | None:
    """Open the voice of the parameter `voice`; None if it is empty.

    OSError or ValueError, which name the parameter, for a voice that cannot be used.
    """
    noise = parameters.speech.noise_scale
    try:
        return open_voice(parameters.voice, noise if noise >= 0 else None) if parameters.voice else None
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"parameter voice: {error}") from None


class SpeechOutput:
    """The robot's voice. Without a voice, every method does nothing.

    Answers are objects that are compared by identity. May be used from any thread.
    """

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        voice: Voice | None,
        *,
        outputs: Outputs,
        metrics: NodeMetrics,
        hears: bool,
    ) -> None:
        """Start the speaker's threads.

        hears: whether sound on ~/audio is used, which may interrupt.
        """
        self._clock, self._logger = node.get_clock(), node.get_logger()
        self._parameters, self._outputs, self._metrics = parameters, outputs, metrics
        self._held: deque[SoundChunk] = deque()
        self._closed = False  # whether the last chunk of ~/audio was kept out
        self._gate: EchoGate | None = None
        self._speaker: Speaker | None = None
        if voice is None:
            return
        self._rate = voice.sample_rate
        if hears:
            self._gate = EchoGate(VoiceActivity(), parameters.current.utterance.threshold)
        self._speaker = Speaker(voice, self._play, metrics.count, self._log)

    @property
    def speaking(self) -> bool:
        """Whether sound is on its way."""
        return self._speaker is not None and self._speaker.speaking

    @property
    def echo_gain(self) -> float:
        """The measured gain of the echo in dB; QUIETEST if it is not known."""
        gain = self._gate.gain if self._gate is not None else math.nan
        return QUIETEST if math.isnan(gain) else gain

    def begin(self, answer: object) -> None:
        """Begin an answer; an earlier one stops."""
        if self._speaker is not None:
            self._speaker.begin(answer)

    def add(self, answer: object, text: str) -> None:
        """Add text to the answer."""
        if self._speaker is not None:
            self._speaker.add(answer, text)

    def end(self, answer: object) -> None:
        """Speak what is left of the answer."""
        if self._speaker is not None:
            self._speaker.end(answer)

    def stop(self, answer: object | None = None) -> None:
        """Be silent at once; `answer`: only if this one is being spoken."""
        if self._speaker is not None:
            self._speaker.stop(answer)

    def close(self) -> None:
        """Stop, and end the threads."""
        if self._speaker is not None:
            self._speaker.close()

    def pass_on(self, chunk: SoundChunk) -> list[SoundChunk]:
        """Return the chunks of ~/audio to listen to, now that this one has arrived.

        None while the robot speaks. A chunk without data ends the stream when it begins to speak. A person
        who interrupts stops it, and is heard from HELD_S before.
        """
        encoding, sample_rate, channels, data, _ = chunk
        if self._gate is None or not len(data):
            return [chunk]
        try:
            samples = PcmFormat(encoding, sample_rate, channels).decode(data)
        except ValueError:  # reported where the stream is read
            return [chunk]
        hearing = self._gate.hear(samples, sample_rate, time.monotonic(), self._parameters.current.speech)
        if hearing is Hearing.CLOSED:
            began, self._closed = not self._closed, True
            self._hold(chunk)
            self._metrics.count("audio_gated")
            return [(encoding, sample_rate, channels, b"", 0)] if began else []
        self._closed = False
        held = list(self._held)
        self._held.clear()
        if hearing is Hearing.OPEN:
            return [chunk]
        self._metrics.count("barge_ins")
        self.stop()
        return [*held, chunk]

    def _hold(self, chunk: SoundChunk) -> None:
        """Keep the newest HELD_S of sound, at least one chunk."""

        def seconds(each: SoundChunk) -> float:
            return len(each[3]) / each[2] / (2 if each[0] == "S16LE" else 4) / each[1]

        same = not self._held or self._held[-1][:3] == chunk[:3]
        if not same:
            self._held.clear()
        self._held.append(chunk)
        while len(self._held) > 1 and sum(map(seconds, self._held)) - seconds(self._held[0]) >= HELD_S:
            self._held.popleft()

    def _play(self, samples: NDArray[np.int16], due: float) -> None:
        """Publish a chunk that is heard from `due` on, by `time.monotonic`."""
        if self._gate is not None:
            self._gate.played(samples, self._rate, due)
        stamp = self._clock.now().nanoseconds + round((due - time.monotonic()) * 1e9)
        self._outputs.publish_speech(
            AudioChunk(
                header=Header(stamp=to_time(max(0, stamp)), frame_id=self._parameters.current.frame_id),
                encoding=AudioChunk.S16LE,
                sample_rate=self._rate,
                channels=1,
                data=samples.astype("<i2").tobytes(),
            )
        )

    def _log(self, problem: str) -> None:
        self._logger.error(f"~/speech: {problem}", throttle_duration_sec=LOG_THROTTLE_S)
