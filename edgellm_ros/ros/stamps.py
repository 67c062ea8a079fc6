# SPDX-License-Identifier: Apache-2.0
"""ROS times as whole nanoseconds, in which they are exact."""

from __future__ import annotations

from builtin_interfaces.msg import Time

NANOSECONDS = 1_000_000_000


def to_time(stamp: int) -> Time:
    """Nanoseconds as a ROS time."""
    return Time(sec=stamp // NANOSECONDS, nanosec=stamp % NANOSECONDS)


def to_nanoseconds(stamp: Time) -> int:
    """A ROS time as nanoseconds."""
    return stamp.sec * NANOSECONDS + stamp.nanosec
