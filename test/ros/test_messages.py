# SPDX-License-Identifier: Apache-2.0
"""Conversion of answers to messages."""

from __future__ import annotations

import numpy as np
from builtin_interfaces.msg import Time
from std_msgs.msg import Header

from edgellm_ros.ros.messaging import to_nanoseconds, to_time
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
