# SPDX-License-Identifier: Apache-2.0
"""ROS helpers of every room: times in nanoseconds, and waiting for messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from builtin_interfaces.msg import Time
from rclpy.executors import Executor

NANOSECONDS = 1_000_000_000
MIN_TIME, MAX_TIME = -(2**31) * NANOSECONDS, 2**31 * NANOSECONDS - 1


def to_time(stamp: int) -> Time:
    """Convert nanoseconds to a ROS time; beyond what it can hold, the nearest one (its seconds are int32)."""
    stamp = min(max(stamp, MIN_TIME), MAX_TIME)
    return Time(sec=stamp // NANOSECONDS, nanosec=stamp % NANOSECONDS)


def to_nanoseconds(stamp: Time) -> int:
    """Convert a ROS time to nanoseconds, without rounding."""
    return stamp.sec * NANOSECONDS + stamp.nanosec


def spin_until(executor: Executor, done: Callable[[], Any], timeout_s: float) -> bool:
    """Run callbacks on this thread until `done()` or for `timeout_s`; return whether it is done."""
    deadline = time.monotonic() + timeout_s
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        executor.spin_once(timeout_sec=left)
    return True
