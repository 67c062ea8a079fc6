# SPDX-License-Identifier: Apache-2.0
"""Spoken to a node whose model has no audio encoder."""

from __future__ import annotations

import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import AudioChunk

DEAF = "this engine has no audio encoder"


@pytest.fixture(scope="module", autouse=True)
def node(start_node, peer, engine_without_audio):
    child = start_node(engine_dir=engine_without_audio, autostart="true")
    peer.connect()
    return child


def test_sound_on_the_topic_is_counted_and_refused(peer):
    before = peer.metrics()["audio_refused"]
    peer.sound(b"\0\0")
    peer.wait(lambda: peer.metrics()["audio_refused"] == before + 1, "refused sound")
    status = peer.status("inputs")
    assert f"~/audio: {DEAF}: sound is ignored" in status.message
    assert "audio_refused" in [pair.key for pair in status.values]


def test_a_goal_with_sound_ends_with_a_clear_error(peer):
    sound = AudioChunk(encoding=AudioChunk.S16LE, sample_rate=16000, data=bytes(32000))
    result = peer.send(Plan.Goal(audio=[sound])).result()
    assert result.termination_reason == Plan.Result.ERROR
    assert DEAF in result.message
