# SPDX-License-Identifier: Apache-2.0
"""Bags as prompts: which commands and frames become requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.cli import main
from edgellm_ros.cli.requests.bag_requests import read_bag
from edgellm_ros.cli.requests.calibration_requests import GREEDY
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.replay.bag import BagError
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.made_bags import ARENA, copy_bag, header, make, string, write_bag

SECOND = 10**9
STRING, IMAGE, ODOMETRY = "std_msgs/msg/String", "sensor_msgs/msg/Image", "nav_msgs/msg/Odometry"


@pytest.fixture(scope="module")
def config(tiny_checkpoint) -> EngineConfig:
    return plan_export(tiny_checkpoint, ExportOptions()).config


def read(path: Path, config: EngineConfig, most: int = 100) -> list[LLMGenerationRequest]:
    return list(read_bag(path, config, most, GREEDY).values())


def command(seconds: float, text: str) -> tuple:
    return "/edgellm/command", STRING, int(seconds * SECOND), string(text)


def frame(seconds: int) -> tuple:
    """A grey frame, as bright as its time in seconds."""
    pixels = np.full(4 * 4 * 3, seconds, np.uint8)
    fields = {"height": 4, "width": 4, "encoding": "rgb8", "is_bigendian": 0, "step": 12, "data": pixels}
    message = make(IMAGE, header=header(seconds * SECOND), **fields)
    return "/edgellm/image", IMAGE, seconds * SECOND, message


def pairs(requests: list[LLMGenerationRequest]) -> list[tuple[str, int]]:
    return [(request.prompt, int(request.images[0][0, 0, 0])) for request in requests]


def test_a_command_is_asked_of_the_frame_before_it_and_of_all_up_to_the_next_command(tmp_path, config):
    messages = [frame(1), command(1.5, "go"), frame(2), command(2.5, "go"), frame(3), command(3.5, "look")]
    found = read(write_bag(tmp_path / "bag", messages), config)
    assert pairs(found) == [("go", 1), ("go", 2), ("go", 3), ("look", 3)]
    assert all(request.sampling.max_tokens == 32 for request in found)


def test_an_empty_command_ends_the_one_before(tmp_path, config):
    messages = [frame(1), command(1.5, "go"), command(1.6, ""), frame(2), command(2.5, "look")]
    assert pairs(read(write_bag(tmp_path / "bag", messages), config)) == [("go", 1), ("look", 2)]


def test_requests_are_spread_over_a_long_bag(tmp_path, config):
    messages = [command(0.5, "go"), *(frame(time) for time in range(1, 101))]
    found = read(write_bag(tmp_path / "bag", messages), config, most=4)
    assert [brightness for _, brightness in pairs(found)] == [1, 26, 51, 76]


def test_the_arenas_bag_has_typed_and_spoken_commands_frames_and_speeds(config):
    found = read(ARENA, config)
    prompts = {request.prompt for request in found}
    assert {"what do you see?", "Travel to the red cone please."} <= prompts
    spoken = [request for request in found if request.audio]
    assert spoken
    assert all(not request.prompt and 1 < request.audio[0].seconds < 4 for request in spoken)
    assert all(request.images[0].shape == (224, 320, 3) for request in found)
    speeds = [request.speed for request in found]
    assert speeds[0] == 0
    assert 0.6 < max(speeds) < 1


def test_a_model_without_encoders_takes_the_commands_alone(tmp_path, config):
    blind = dataclasses.replace(config, vision=None, audio=None, action=None)
    bag = copy_bag(tmp_path / "bag", keep=lambda message: message.topic.name != "/edgellm/image")
    found = read(bag, blind)
    assert [request.prompt for request in found][:1] == ["what do you see?"]
    assert not any(request.images or request.audio for request in found)


def test_an_utterance_that_the_bags_end_cuts_off_has_the_time_of_the_last_message(tmp_path, config):
    blind = dataclasses.replace(config, vision=None, action=None)
    times = []

    def begins(message) -> bool:
        times.extend([message.time] if message.topic.name == "/edgellm/audio" and len(times) < 16 else [])
        return message.time in times and message.topic.name == "/edgellm/audio"

    (where,) = read_bag(copy_bag(tmp_path / "bag", keep=begins), blind, 100, GREEDY)
    stamp = int(where.removesuffix(" ns").rpartition(" ")[2])
    assert 0 <= times[-1] - stamp < SECOND / 5  # a message is stored after its stamp


def test_a_bag_without_frames_or_commands_is_refused_with_its_topics(tmp_path, config):
    bag = copy_bag(tmp_path / "dark", keep=lambda message: message.topic.name != "/edgellm/image")
    with pytest.raises(BagError, match=r"dark: no messages for ~/image \(/edgellm/image\); the bag has "):
        read(bag, config)
    silent = copy_bag(tmp_path / "silent", keep=lambda message: message.topic.name == "/edgellm/image")
    with pytest.raises(BagError, match=r"silent: no messages for ~/command .* or ~/audio .*; the bag has "):
        read(silent, config)
    late = write_bag(tmp_path / "late", [command(1, "go"), command(2, ""), frame(3)])
    with pytest.raises(BagError, match="late: no command or utterance with a camera frame"):
        read(late, config)


def test_a_frame_that_cannot_be_decoded_is_named_with_the_bag(tmp_path, config):
    topic, kind, time, message = frame(1)
    blue = topic, kind, time, dataclasses.replace(message, encoding="blue")
    bad = write_bag(tmp_path / "bag", [blue, command(2, "go")])
    with pytest.raises(BagError, match="bag: image encoding 'blue' is not supported"):
        read(bad, config)


@pytest.mark.slow
def test_export_calibrates_with_a_bag(tiny_checkpoint, tmp_path, capsys):
    arguments = ["export", str(tiny_checkpoint), str(tmp_path / "engine")]
    assert main([*arguments, "--quantize", "int8", "--calibrate", str(ARENA), "--no-report"]) == 0
    assert f"{ARENA}: 15 requests, " in capsys.readouterr().err
