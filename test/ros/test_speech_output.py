# SPDX-License-Identifier: Apache-2.0
"""The robot's voice and its microphone: echo is kept out, a person is heard."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import soxr
from rclpy.clock import Clock
from rclpy.logging import get_logger

from edgellm_ros.multimodal.audio.utterance import UtteranceSettings
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.speech import SpeechParameters
from edgellm_ros.ros.node.speech_output import HELD_S, SpeechOutput, open_robots_voice
from edgellm_ros.voice.voice import open_voice
from fixtures.spoken_commands import interrupting_person

pytestmark = pytest.mark.real_time
RATE = 16000
CHUNK = 512
ECHO = 0.1
ANSWER = "I see a red box on the left side, and a blue cone stands behind it. " * 3
PARAMETERS = SimpleNamespace(
    voice="espeak", speech=SpeechParameters(), utterance=UtteranceSettings(), frame_id="base_link"
)


class Robot:
    """A node's speech output whose loudspeaker the microphone hears."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.silent_since = 0.0
        self._heard: list[tuple[float, np.ndarray]] = []
        self._lock = threading.Lock()
        node = SimpleNamespace(get_clock=Clock, get_logger=lambda: get_logger("test"))
        self.output = SpeechOutput(
            node,
            LiveParameters(PARAMETERS),
            open_voice("espeak"),
            outputs=SimpleNamespace(publish_speech=self._publish),
            metrics=SimpleNamespace(count=self._count),
            hears=True,
        )

    def _count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def _publish(self, message) -> None:
        samples = np.frombuffer(bytes(message.data), "<i2").astype(np.float32) / 32768
        with self._lock:
            if not samples.size:
                self.silent_since = time.monotonic()
                self._heard.clear()
            else:
                heard_at = time.monotonic() + 0.1  # playback
                if self._heard:
                    heard_at = max(heard_at, self._heard[-1][0] + len(self._heard[-1][1]) / RATE)
                self._heard.append((heard_at, soxr.resample(samples, message.sample_rate, RATE) * ECHO))

    def microphone(self, until: float) -> np.ndarray:
        """Return the chunk that ends at a time: echo and noise."""
        begin = until - CHUNK / RATE
        chunk = np.random.default_rng(int(until * 1000)).normal(0, 0.001, CHUNK).astype(np.float32)
        with self._lock:
            for at, samples in self._heard:
                offset = round((at - begin) * RATE)
                source = samples[max(0, -offset) : CHUNK - offset] if offset < CHUNK else samples[:0]
                chunk[max(0, offset) : max(0, offset) + len(source)] += source
        return chunk


@pytest.fixture
def robot():
    robot = Robot()
    yield robot
    robot.output.close()


@pytest.fixture(scope="module")
def person() -> np.ndarray:
    return interrupting_person(0.12)


def listen(robot: Robot, seconds: float, person: np.ndarray | None = None) -> tuple[list[int], float]:
    """Feed the microphone in real time; return sizes of what passed, and the begin."""
    passed, begin = [], time.monotonic()
    for number in range(int(seconds * RATE / CHUNK)):
        now = begin + (number + 1) * CHUNK / RATE
        time.sleep(max(0.0, now - time.monotonic()))
        chunk = robot.microphone(now)
        if person is not None:
            chunk += np.resize(person[number * CHUNK : (number + 1) * CHUNK], CHUNK)
        for _, _, _, data, _ in robot.output.pass_on(("F32LE", RATE, 1, chunk.tobytes(), 0)):
            passed.append(len(data) // 4)
    return passed, begin


def test_a_person_stops_the_robot_and_is_heard_from_the_beginning(robot, person):
    passed, _ = listen(robot, 0.5)
    assert passed == [CHUNK] * (RATE // 2 // CHUNK)
    robot.output.begin(robot)
    robot.output.add(robot, ANSWER)
    while not robot.output.speaking:
        time.sleep(0.005)
    passed, _ = listen(robot, 3.0)
    assert passed[-1:] == [0]  # the end of the stream, and no echo
    assert sum(passed) <= 4 * CHUNK
    assert robot.output.echo_gain == pytest.approx(-20, abs=8)
    passed, begin = listen(robot, 1.0, person)
    assert robot.counts["barge_ins"] == 1
    assert robot.counts["sentences_stopped"] >= 1
    assert not robot.output.speaking
    assert robot.silent_since - begin < 0.2
    assert sum(passed) / RATE > 1.0 + HELD_S - 0.3  # with what came before it was noticed


def test_the_robot_speaks_to_its_end_without_an_interruption(robot):
    robot.output.begin(robot)
    robot.output.add(robot, "I see a red box. It is red.")
    robot.output.end(robot)
    listen(robot, 3.5)
    assert robot.counts["sentences_spoken"] == 2
    assert not robot.counts["barge_ins"]
    assert robot.counts["audio_gated"] > 20
    assert listen(robot, 0.2)[0][-1:] == [CHUNK]


def test_a_broken_chunk_is_passed_on_to_be_reported(robot):
    broken = ("S24LE", RATE, 1, b"abc", 0)
    assert robot.output.pass_on(broken) == [broken]


def test_a_voice_that_cannot_be_used_is_named():
    parameters = SimpleNamespace(voice="/none.onnx", speech=SpeechParameters())
    with pytest.raises(ValueError, match=r"parameter voice: /none\.onnx: no such file"):
        open_robots_voice(parameters)
