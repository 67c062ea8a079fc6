# SPDX-License-Identifier: Apache-2.0
"""The node edgellm_play writes what it hears, and stops when it is told."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
from edgellm_ros.msg import AudioChunk

from edgellm_ros.ros.processes import Child, ros_environment

RATE = 16000
TONE = (8000 * np.sin(np.arange(RATE) * 0.1)).astype("<i2")


@pytest.fixture
def start_player(domain, tmp_path):
    children = []

    def start(*parameters: str) -> Child:
        values = [argument for each in parameters for argument in ("-p", each)]
        arguments = ["-m", "edgellm_ros.ros.play.main", "--ros-args", *values]
        children.append(Child("play_node", arguments, tmp_path / "play.log", ros_environment(domain)))
        return children[-1]

    yield start
    for child in children:
        child.stop()


def chunk(samples: np.ndarray, **fields: object) -> AudioChunk:
    return AudioChunk(**{"encoding": "S16LE", "sample_rate": RATE, "data": samples.tobytes(), **fields})


def test_it_writes_the_sound_of_its_topic(start_player, peer, tmp_path):
    child = start_player("device:=none", f"file:={tmp_path}/out.wav")
    publisher = peer.node.create_publisher(AudioChunk, "/edgellm_play/speech", 100)
    peer.wait(publisher.get_subscription_count, "subscription")
    publisher.publish(chunk(TONE, encoding="S24LE"))
    publisher.publish(chunk(TONE))
    publisher.publish(chunk((TONE / 32768).astype("<f4"), encoding="F32LE"))
    peer.wait(lambda: (tmp_path / "out.wav").exists(), "file")
    peer.wait(lambda: soundfile.info(tmp_path / "out.wav").frames == 2 * RATE, "sound")
    publisher.publish(chunk(TONE[:0]))
    publisher.publish(chunk(TONE[:160]))
    peer.wait(lambda: soundfile.info(tmp_path / "out.wav").frames == 2 * RATE + 160, "sound after a stop")
    assert child.stop() == 0
    samples, rate = soundfile.read(tmp_path / "out.wav", dtype="int16")
    assert rate == RATE
    assert np.array_equal(samples, [*TONE, *TONE, *TONE[:160]])
    assert "sound encoding 'S24LE' is not supported" in child.log_tail()


def test_without_sound_card_and_file_it_says_what_to_set(start_player):
    child = start_player("device:=none")
    assert child.process.wait(30) == 2
    expected = (
        "play_node: error: parameter device is none, and parameter file is empty: set it to the WAV file"
    )
    assert expected in child.log_tail()
    assert "Traceback" not in child.log_tail()
