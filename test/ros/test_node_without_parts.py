# SPDX-License-Identifier: Apache-2.0
"""A node that leaves encoders and the action head of its engine directory out."""

from __future__ import annotations

import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import AudioChunk

from fixtures.peer import image_message

LEFT_OUT = "was left out when this engine directory was opened"


@pytest.fixture(scope="module", autouse=True)
def node(start_node, peer, arena_engine):
    child = start_node(
        engine_dir=arena_engine, autostart="true", without="[visual, audio, action]", plan_timeout=30.0,
        input_reliability="reliable",
    )  # fmt: skip
    peer.connect()
    return child


def test_a_command_is_answered_without_a_frame(peer):
    peer.clear()
    peer.command("what do you see?")
    peer.wait(lambda: peer.received["generation"], "generation")
    assert peer.received["generation"][-1].text
    peer.listen(0.2)
    assert peer.received["action_chunk"] == []


def test_frames_on_the_topic_are_counted_and_refused(peer, scene):
    before = peer.metrics()["frames_refused"]
    peer.frame(scene.pixels)
    peer.wait(lambda: peer.metrics()["frames_refused"] == before + 1, "refused frame")
    assert f"~/image: the vision encoder {LEFT_OUT}: frames are ignored" in peer.status("inputs").message


def test_sound_on_the_topic_is_counted_and_refused(peer):
    before = peer.metrics()["audio_refused"]
    peer.sound(b"\0\0")
    peer.wait(lambda: peer.metrics()["audio_refused"] == before + 1, "refused sound")
    assert f"~/audio: the audio encoder {LEFT_OUT}: sound is ignored" in peer.status("inputs").message


def test_a_missing_camera_is_no_problem(peer):
    assert "no camera frame" not in peer.status("inputs").message


def test_a_goal_in_words_has_no_trajectory(peer):
    result = peer.plan(Plan.Goal(prompt="what do you see?", action_samples=2))
    assert (result.termination_reason, result.message) == (Plan.Result.COMPLETED, "")
    assert result.generation.text
    assert list(result.action_chunks) == []


@pytest.mark.parametrize("part", ["vision", "audio"])
def test_a_goal_that_needs_an_encoder_ends_with_a_clear_error(peer, scene, part):
    sound = AudioChunk(encoding=AudioChunk.S16LE, sample_rate=16000, data=bytes(32000))
    inputs = {"images": [image_message(scene.pixels)]} if part == "vision" else {"audio": [sound]}
    result = peer.send(Plan.Goal(prompt="go", **inputs)).result()
    assert result.termination_reason == Plan.Result.ERROR
    assert f"the {part} encoder {LEFT_OUT}" in result.message


def test_plans_of_frames_are_refused(peer):
    result = peer.set_parameter("plan_on", "image")
    assert not result.successful
    assert result.reason == f"plan_on must be command: the vision encoder {LEFT_OUT}, got 'image'"


def test_an_unknown_part_is_refused(peer):
    result = peer.set_parameter("without", ["vision"])
    assert not result.successful
    assert "while the node is unconfigured" in result.reason
