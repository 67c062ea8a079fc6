# SPDX-License-Identifier: Apache-2.0
"""The node speaks answers while they are generated, and is silent at once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import AudioChunk, SamplingParams

from edgellm_ros.ros.messaging import to_nanoseconds
from fixtures.tiny_voice import RATE, write_tiny_voice

WORDS = "what do you see?"


@pytest.fixture(scope="module")
def node(start_node, peer, arena_engine, tmp_path_factory):
    """The node, active, with the demo's engine and a voice."""
    child = start_node(
        engine_dir=arena_engine, autostart="true", max_input_age=30.0, plan_timeout=30.0,
        input_reliability="reliable", voice=write_tiny_voice(tmp_path_factory.mktemp("voice"), per_id=160),
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture
def fresh(node, peer, scene):
    peer.command("")
    peer.wait(lambda: not peer.metrics()["speaking"], "silence")
    peer.frame(scene.pixels)
    peer.listen(0.2)
    peer.clear()


def chunks(peer) -> list[AudioChunk]:
    return peer.received["speech"]


def first_sound(peer) -> AudioChunk:
    return peer.wait(lambda: chunks(peer), "sound")[0]


def end_of_sound(peer) -> None:
    peer.wait(lambda: chunks(peer) and not chunks(peer)[-1].data, "silence")


def seconds(peer) -> float:
    return sum(len(chunk.data) for chunk in chunks(peer)) / 2 / RATE


@pytest.mark.usefixtures("fresh")
class TestAnswers:
    def test_an_answer_is_spoken_in_real_time_and_ends_with_an_empty_chunk(self, peer):
        before = peer.metrics()
        peer.command(WORDS)
        chunk = first_sound(peer)
        began = time.monotonic()
        end_of_sound(peer)
        assert (chunk.encoding, chunk.sample_rate, chunk.channels) == ("S16LE", RATE, 1)
        assert max(len(each.data) for each in chunks(peer)) <= 2 * RATE // 10
        spoken = seconds(peer)
        text = peer.wait(lambda: peer.received["text"], "text")[-1].data
        assert spoken > 0.01 * len(text)
        assert time.monotonic() - began > spoken - 0.5  # no faster than it is heard
        assert np.frombuffer(bytes(chunk.data), "<i2").any()
        after = peer.metrics()
        assert after["sentences_spoken"] > before["sentences_spoken"]
        assert after["sentences_stopped"] == before["sentences_stopped"]

    def test_stamps_follow_each_other_without_gaps(self, peer):
        peer.command(WORDS)
        first_sound(peer)
        end_of_sound(peer)
        stamps = [to_nanoseconds(chunk.header.stamp) for chunk in chunks(peer)[:-1]]
        lengths = [len(chunk.data) / 2 / RATE * 1e9 for chunk in chunks(peer)[:-1]]
        gaps = np.diff(stamps) - lengths[:-1]
        assert np.abs(gaps).min() < 2e6
        assert np.median(np.abs(gaps)) < 5e6

    def test_a_new_command_stops_the_answer_before(self, peer):
        before = peer.metrics()
        peer.command(WORDS)
        first_sound(peer)
        peer.command("")
        asked = time.monotonic()
        end_of_sound(peer)
        assert time.monotonic() - asked < 1.0  # 0.2 s on an idle computer
        assert peer.metrics()["sentences_stopped"] > before["sentences_stopped"]
        peer.listen(0.5)
        assert not chunks(peer)[-1].data

    def test_a_goal_is_spoken(self, peer):
        result = peer.plan(Plan.Goal(prompt=WORDS, action_samples=0))
        first_sound(peer)
        end_of_sound(peer)
        assert seconds(peer) > 0.01 * len(result.generation.text)

    def test_deactivation_stops_the_speech(self, peer):
        before = peer.metrics()["sentences_stopped"]
        peer.command(WORDS)
        first_sound(peer)
        assert peer.transition("deactivate")
        peer.wait(lambda: not peer.metrics()["speaking"], "silence", timeout_s=0.5)
        assert peer.metrics()["sentences_stopped"] > before
        assert peer.transition("activate")
        peer.connect()

    def test_the_microphone_is_not_listened_to_meanwhile(self, peer):
        before = peer.metrics()
        peer.command(WORDS)
        first_sound(peer)
        for _ in range(5):
            peer.sound(np.zeros(RATE // 10, "<i2").tobytes())
        peer.wait(lambda: peer.metrics()["audio_gated"] == before["audio_gated"] + 5, "gated sound")
        end_of_sound(peer)
        peer.listen(0.5)  # longer than speech.tail
        peer.sound(np.zeros(RATE // 10, "<i2").tobytes())
        received = before["audio_received"] + 6
        peer.wait(lambda: peer.metrics()["audio_received"] == received, "sound")
        assert peer.metrics()["audio_gated"] == before["audio_gated"] + 5

    def test_an_answer_with_a_grammar_is_not_spoken(self, peer):
        goal = Plan.Goal(prompt=WORDS, action_samples=0, sampling=SamplingParams(choices=["left", "right"]))
        peer.plan(goal)
        peer.listen(0.5)
        assert not chunks(peer)

    def test_with_plan_on_image_the_first_plan_of_a_command_is_spoken(self, peer, scene):
        peer.set_parameter("plan_on", "image")
        try:
            before = peer.metrics()
            peer.command(WORDS)
            first_sound(peer)
            count = len(peer.received["generation"])
            for _ in range(3):
                peer.frame(scene.pixels)
                peer.wait(lambda n=count: len(peer.received["generation"]) > n, "plan")
                count = len(peer.received["generation"])
            end_of_sound(peer)
            peer.listen(0.5)
            assert sum(not chunk.data for chunk in chunks(peer)) == 1
            assert peer.metrics()["sentences_stopped"] == before["sentences_stopped"]
        finally:
            peer.set_parameter("plan_on", "command")
