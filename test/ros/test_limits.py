# SPDX-License-Identifier: Apache-2.0
"""Limits of message sizes: messages at a limit are taken.

Larger ones are refused with value and limit.
"""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import ActionChunk, AudioChunk, ChatMessage, PreviousChunk, SamplingParams, ToolCall
from sensor_msgs.msg import CompressedImage, Image

from edgellm_ros.ros.node.messages import earlier_messages_from_goal
from edgellm_ros.ros.node.sensors.images import decode_image
from fixtures.node_limits import limits
from fixtures.peer import image_message

pytestmark = pytest.mark.only_on("cpu", reason="nothing here runs on a device")


def image(size: int) -> Image:
    return Image(data=bytes(size))


# limit: (its value, a goal at the limit, a goal beyond it, the beginning of the error)
CASES = {
    "images": (
        2,
        Plan.Goal(images=[image(1)], earlier_messages=[ChatMessage(images=[image(1)])]),
        Plan.Goal(images=[image(1)], earlier_messages=[ChatMessage(images=[image(1), image(1)])]),
        "the goal has 3 images, with those of earlier messages, at most 2 are taken",
    ),
    "messages": (
        1,
        Plan.Goal(earlier_messages=[ChatMessage()]),
        Plan.Goal(earlier_messages=[ChatMessage()] * 2),
        "the goal has 2 earlier messages, at most 1 are taken",
    ),
    "message_bytes": (
        7,
        Plan.Goal(images=[image(3)], audio=[AudioChunk(data=bytes(2))] * 2),
        Plan.Goal(images=[image(4)], audio=[AudioChunk(data=bytes(2))] * 2),
        "the goal has 8 bytes of data, at most 7 are taken",
    ),
    "message_bytes of trajectories": (
        4000,
        Plan.Goal(previous_chunk=[PreviousChunk(chunk=ActionChunk(values=[0.0] * 1000))]),
        Plan.Goal(previous_chunk=[PreviousChunk(chunk=ActionChunk(values=[0.0] * 1001))]),
        "the goal has 4004 bytes of data, at most 4000 are taken",
    ),
    "message_bytes of a state": (
        16,
        Plan.Goal(state=[0.0] * 2),
        Plan.Goal(state=[0.0] * 3),
        "the goal has 24 bytes of data, at most 16 are taken",
    ),
    "text_length": (
        6,
        Plan.Goal(prompt="go", system_prompt="be", earlier_messages=[ChatMessage(text="ok")]),
        Plan.Goal(prompt="go", system_prompt="be", earlier_messages=[ChatMessage(text="yes")]),
        "the goal has 7 characters, at most 6 are taken",
    ),
    "choices": (
        2,
        Plan.Goal(sampling=SamplingParams(choices=["a", "b"])),
        Plan.Goal(sampling=SamplingParams(choices=["a", "b", "c"])),
        "choices has 3 texts, at most 2 are taken",
    ),
    "grammar_length": (
        4,
        Plan.Goal(sampling=SamplingParams(regex="a{3}")),
        Plan.Goal(sampling=SamplingParams(regex="a{33}")),
        "regex has 5 characters, at most 4 are taken",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_goal_at_a_limit_is_taken(name):
    value, taken, _, _ = CASES[name]
    limits(**{name.split()[0]: value}).check_goal(taken)


@pytest.mark.parametrize("name", CASES)
def test_a_goal_beyond_a_limit_is_refused_with_value_and_parameter(name):
    value, _, refused, message = CASES[name]
    limit = name.split()[0]
    with pytest.raises(ValueError, match=rf"^{message} \(parameter limits\.{limit}\)$"):
        limits(**{limit: value}).check_goal(refused)


@pytest.mark.parametrize(
    "sampling, message",
    [
        (SamplingParams(json_schema="{     }"), "json_schema has 7 characters"),
        (SamplingParams(choices=["abc", "de"]), "choices has 5 characters"),
        (SamplingParams(stop=["abc", "de"]), "stop has 5 characters"),
    ],
)
def test_every_field_of_a_grammar_has_the_limit_of_its_length(sampling, message):
    with pytest.raises(ValueError, match=f"{message}, at most 4 are taken"):
        limits(grammar_length=4).check_goal(Plan.Goal(sampling=sampling))


def test_tools_have_the_limits_of_grammars():
    with pytest.raises(ValueError, match="tools has 5 characters, at most 4 are taken"):
        limits(grammar_length=4).check_goal(Plan.Goal(tools=["abc", "de"]))
    with pytest.raises(ValueError, match="tools has 3 texts, at most 2 are taken"):
        limits(choices=2).check_goal(Plan.Goal(tools=["a", "b", "c"]))


def test_calls_in_earlier_messages_are_text():
    call = ToolCall(name="stop", arguments="{}")
    with pytest.raises(ValueError, match="the goal has 6 characters, at most 5 are taken"):
        limits(text_length=5).check_goal(Plan.Goal(earlier_messages=[ChatMessage(tool_calls=[call])]))


def test_too_many_stop_strings_are_refused():
    with pytest.raises(ValueError, match="stop has 3 texts, at most 2 are taken"):
        limits(choices=2).check_goal(Plan.Goal(sampling=SamplingParams(stop=["a", "b", "c"])))


def test_the_defaults_take_256_frames_of_a_vga_camera_and_a_frame_of_8k():
    limits().check_goal(Plan.Goal(images=[image(640 * 480 * 3)] * 256))
    limits().check_data("the camera frame", [bytes(7680 * 4320 * 6)])


def test_a_raw_image_beyond_the_limit_of_pixels_is_refused():
    message = image_message(np.zeros((4, 6, 3), np.uint8))
    decode_image(message, max_pixels=24)
    with pytest.raises(ValueError, match=r"6 x 4 pixels, at most 23 pixels .*limits.image_pixels"):
        decode_image(message, max_pixels=23)


def test_a_small_file_of_a_large_image_is_refused_before_it_is_decoded(monkeypatch):
    data = cv2.imencode(".png", np.zeros((400, 600, 3), np.uint8))[1].tobytes()
    monkeypatch.setattr(cv2, "imdecode", None)
    with pytest.raises(ValueError, match=r"600 x 400 pixels, at most 1000 pixels"):
        decode_image(CompressedImage(format="png", data=data), max_pixels=1000)


def test_an_image_of_an_earlier_message_has_the_limit_too():
    earlier = [ChatMessage(role="user", images=[image_message(np.zeros((4, 6, 3), np.uint8))])]
    with pytest.raises(ValueError, match=r"earlier_messages\[0\] \(user\): .* at most 23 pixels"):
        earlier_messages_from_goal(earlier, max_pixels=23)
