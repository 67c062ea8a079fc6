# SPDX-License-Identifier: Apache-2.0
"""The thread of the speech engine, with a double of the engine."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rclpy.logging import get_logger

from edgellm_ros.multimodal.audio.sound_stream import Utterance
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.node.listener import MOST_WAITING, Listener
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.planning.command_trigger import Command
from edgellm_ros.ros.node.settings.hearing import HearingSettings
from edgellm_ros.runtime.transcript import Transcript

PATIENCE_S = 20.0
SURE, UNSURE = -0.1, -2.0


class Transcriber:
    """Says for each sound what its first sample stands for.

    Waits while `hold` is clear.
    """

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.heard: list[int] = []

    def transcribe(self, sound, language, context, cancel) -> Transcript:
        number = round(float(sound.samples[0]) * 100)
        self.heard.append(number)
        while not self.hold.wait(0.01) and not cancel.is_set():
            pass
        if number == 99:
            raise ValueError("too long")
        return Transcript(f"go to {number}", "English", UNSURE if number == 50 else SURE)


class Listening:
    """A listener, and what it does."""

    def __init__(self) -> None:
        self.transcriber, self.metrics = Transcriber(), NodeMetrics()
        self.published: list = []
        self.commands: list[Command] = []
        node = SimpleNamespace(
            get_logger=lambda: get_logger("test"),
            create_guard_condition=lambda callback: SimpleNamespace(trigger=callback),
            destroy_guard_condition=lambda guard: None,
        )
        parameters = SimpleNamespace(current=SimpleNamespace(hearing=HearingSettings()))
        outputs = SimpleNamespace(publish_transcript=self.published.append)
        self.listener = Listener(node, parameters, self.transcriber, outputs, self.metrics)
        self.listener.start(lambda: self.commands.extend(self.listener.take()))

    def count(self, name: str) -> float:
        return self.metrics.values()[name]

    def until(self, done) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end
            time.sleep(0.005)


@pytest.fixture
def listening():
    made = Listening()
    yield made
    made.transcriber.hold.set()
    made.listener.close()


def utterance(number: int, stamp: int = 0) -> Utterance:
    return Utterance(Sound(np.full(16000, number / 100, np.float32), 16000), stamp, 0, "silence")


def test_a_sure_utterance_becomes_a_command(listening):
    listening.listener.add(utterance(7, stamp=3_000_000_005))
    listening.until(lambda: listening.commands)
    assert listening.commands == [Command("go to 7")]
    (message,) = listening.published
    assert (message.text, message.language, message.command, message.reason) == (
        "go to 7", "English", "go to 7", "",
    )  # fmt: skip
    assert message.final
    assert message.duration == 1.0
    assert message.confidence == pytest.approx(SURE)
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (3, 5)
    assert listening.count("transcripts_obeyed") == 1


def test_an_unsure_utterance_is_published_and_not_obeyed(listening):
    listening.listener.add(utterance(50))
    listening.until(lambda: listening.count("transcripts_refused") == 1)
    (message,) = listening.published
    assert message.text == "go to 50"
    assert not message.command
    assert message.reason.startswith("unsure")
    assert not listening.commands


def test_utterances_are_obeyed_in_their_order(listening):
    for number in (1, 2, 3):
        listening.listener.add(utterance(number))
    listening.until(lambda: len(listening.commands) == 3)
    assert [command.text for command in listening.commands] == ["go to 1", "go to 2", "go to 3"]


def test_speech_so_far_is_published_and_not_obeyed(listening):
    listening.listener.follow(utterance(4))
    listening.until(lambda: listening.published)
    assert not listening.published[0].final
    assert not listening.published[0].command
    assert not listening.commands


def test_the_end_of_an_utterance_cancels_its_partial_transcript(listening):
    listening.transcriber.hold.clear()
    listening.listener.follow(utterance(4))
    listening.until(lambda: listening.transcriber.heard == [4])
    listening.listener.add(utterance(5))
    listening.until(lambda: listening.transcriber.heard == [4, 5])
    listening.transcriber.hold.set()
    listening.until(lambda: listening.commands)
    assert [message.text for message in listening.published] == ["go to 5"]


def test_speech_so_far_is_left_out_while_the_engine_is_busy(listening):
    listening.transcriber.hold.clear()
    listening.listener.add(utterance(1))
    listening.until(lambda: listening.transcriber.heard == [1])
    assert not listening.listener.idle
    listening.listener.follow(utterance(2))
    listening.transcriber.hold.set()
    listening.until(lambda: listening.listener.idle)
    assert listening.transcriber.heard == [1]


def test_of_too_many_utterances_the_oldest_waiting_one_is_dropped(listening):
    listening.transcriber.hold.clear()
    listening.listener.add(utterance(0))
    listening.until(lambda: listening.transcriber.heard == [0])
    for number in range(1, MOST_WAITING + 2):
        listening.listener.add(utterance(number))
    assert listening.listener.problem
    assert listening.count("utterances_skipped") == 1
    listening.transcriber.hold.set()
    listening.until(lambda: len(listening.commands) == MOST_WAITING + 1)
    assert listening.transcriber.heard == [0, *range(2, MOST_WAITING + 2)]


def test_an_error_of_the_engine_is_reported_and_the_next_utterance_is_heard(listening):
    listening.listener.add(utterance(99))
    listening.until(lambda: listening.count("transcripts_failed") == 1)
    assert listening.listener.problem == "no transcript: too long"
    listening.listener.add(utterance(1))
    listening.until(lambda: listening.commands)


def test_after_clear_nothing_of_before_is_obeyed(listening):
    listening.transcriber.hold.clear()
    for number in (1, 2):
        listening.listener.add(utterance(number))
    listening.until(lambda: listening.transcriber.heard == [1])
    listening.listener.clear()
    listening.until(lambda: listening.listener.idle)
    assert not listening.commands
    assert not listening.published
    assert listening.transcriber.heard == [1]


def test_close_ends_the_thread_during_a_transcript(listening):
    listening.transcriber.hold.clear()
    listening.listener.add(utterance(1))
    listening.until(lambda: listening.transcriber.heard == [1])
    listening.listener.close()
    assert not any(thread.name == "listener" and thread.is_alive() for thread in threading.enumerate())
