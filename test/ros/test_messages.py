# SPDX-License-Identifier: Apache-2.0
"""Conversion of answers to messages."""

from __future__ import annotations

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from edgellm_ros.msg import ActionChunk, ChatMessage, PreviousChunk, ToolCall
from std_msgs.msg import Header

from edgellm_ros.diffusion.config import ActionSpaceConfig
from edgellm_ros.ros.messaging import to_nanoseconds, to_time
from edgellm_ros.ros.node.messages import chunk_condition_from_message, earlier_messages_from_goal
from edgellm_ros.ros.path_message import to_path

LAST_TIME = 2**31 * 10**9 - 1  # the seconds of a ROS time are int32


def test_the_poses_of_a_path_do_not_go_beyond_the_last_time_that_a_stamp_can_hold():
    header = Header(stamp=Time(sec=2**31 - 1, nanosec=750_000_000), frame_id="base_link")
    path = to_path(np.zeros((5, 4)), 0.1, header)
    stamps = [to_nanoseconds(pose.header.stamp) for pose in path.poses]
    start = LAST_TIME + 1 - 250_000_000
    assert stamps == [start, start + 10**8, start + 2 * 10**8, LAST_TIME, LAST_TIME]


def test_times_that_a_stamp_cannot_hold_become_the_nearest_one():
    assert to_time(LAST_TIME + 5 * 10**9) == Time(sec=2**31 - 1, nanosec=999_999_999)
    assert to_time(-(10**19)) == Time(sec=-(2**31), nanosec=0)


class TestPreviousChunk:
    """The chunk that a goal continues."""

    SPACE = ActionSpaceConfig(
        type="unicycle",
        names=("acceleration", "curvature"),
        units=("m/s^2", "1/m"),
        dt=0.1,
        horizon=3,
        mean=(0.0, 0.0),
        std=(1.0, 1.0),
        low=(-1.5, -2.5),
        high=(1.0, 2.5),
    )

    def message(self, chunk=None, **fields) -> PreviousChunk:
        values = {"dt": 0.1, "horizon": 3, "names": ["acceleration", "curvature"]}
        values |= {"values": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]} | (chunk or {})
        fields = {"form": "frozen", "executed": 1, "delay": 1} | fields
        return PreviousChunk(**fields, chunk=ActionChunk(**values))

    def convert(self, **fields):
        return chunk_condition_from_message(self.message(**fields), self.SPACE)

    def test_zero_and_empty_fields_are_defaults(self):
        condition = self.convert()
        np.testing.assert_array_equal(condition.actions, np.float32([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]))
        assert (condition.form, condition.executed, condition.delay) == ("frozen", 1, 1)
        assert (condition.horizon, condition.schedule) == (None, "linear")
        assert condition.max_guidance_weight is None

    def test_other_fields_are_kept(self):
        condition = self.convert(form="guided", horizon=2, schedule="exp", max_guidance_weight=5.0)
        assert (condition.horizon, condition.schedule, condition.max_guidance_weight) == (2, "exp", 5.0)

    def test_off_is_no_condition(self):
        assert self.convert(form="off", chunk={"names": []}) is None

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"form": ""}, "form must be one of off, guided, frozen, trained, got ''"),
            ({"chunk": {"names": ["x", "y"]}}, "the names of chunk must be acceleration, .* got 'x, y'"),
            ({"chunk": {"dt": 0.2}}, "dt of chunk must be 0.1, got 0.2"),
            ({"chunk": {"values": [1.0]}}, "chunk has 1 values, expected horizon 3 x 2 names"),
            ({"chunk": {"values": [float("nan")] * 6}}, "actions has values that are not finite"),
            ({"delay": -1}, "delay must be an integer of at least 0, got -1"),
            ({"horizon": -2}, "horizon must be an integer of at least 1, got -2"),
            ({"max_guidance_weight": float("inf")}, "max_guidance_weight must be a number above 0"),
            ({"schedule": "sudden"}, "schedule must be one of linear, exp, ones, zeros, got 'sudden'"),
        ],
    )
    def test_bad_values_are_errors_that_name_them(self, fields, reason):
        with pytest.raises(ValueError, match=f"^previous_chunk: {reason}"):
            self.convert(**fields)


def test_tool_calls_of_earlier_answers_reach_the_chat_template():
    call = ToolCall(name="find", arguments='{"what": "box"}')
    said = ChatMessage(role="assistant", text="I look.", tool_calls=[call])
    answer, result = earlier_messages_from_goal([said, ChatMessage(role="tool", text="ok")])
    function = {"name": "find", "arguments": {"what": "box"}}
    assert answer.fields == {"tool_calls": [{"type": "function", "function": function}]}
    assert (answer.content, result.role, result.fields) == ("I look.", "tool", {})
