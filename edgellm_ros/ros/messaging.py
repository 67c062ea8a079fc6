# SPDX-License-Identifier: Apache-2.0
"""ROS helpers: times in nanoseconds, QoS of services, waiting for messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from builtin_interfaces.msg import Time
from rclpy.executors import Executor
from rclpy.qos import QoSProfile

NANOSECONDS = 1_000_000_000
SERVICE_DEPTH = 100  # ROS's default of 10 loses requests and answers when many clients call at once
MIN_TIME, MAX_TIME = -(2**31) * NANOSECONDS, 2**31 * NANOSECONDS - 1


def to_time(stamp: int) -> Time:
    """Convert nanoseconds to the nearest ROS time (whose seconds are int32)."""
    stamp = min(max(stamp, MIN_TIME), MAX_TIME)
    return Time(sec=stamp // NANOSECONDS, nanosec=stamp % NANOSECONDS)


def to_nanoseconds(stamp: Time) -> int:
    """Convert a ROS time to nanoseconds, without rounding."""
    return stamp.sec * NANOSECONDS + stamp.nanosec


def services_qos(depth: int = SERVICE_DEPTH) -> QoSProfile:
    """Return the QoS of a service or client for `depth` unread messages."""
    return QoSProfile(depth=depth)


def action_services_qos(depth: int = SERVICE_DEPTH) -> dict[str, QoSProfile]:
    """Return arguments for an ActionServer or ActionClient: the QoS of its services.

    The clients of a service share one topic for its answers: the reader of each client receives the answers
    to all clients.
    """
    names = ("goal", "result", "cancel")
    return {f"{name}_service_qos_profile": services_qos(depth) for name in names}


def spin_until(executor: Executor, done: Callable[[], Any], timeout_s: float) -> bool:
    """Run callbacks on this thread until `done()` or for `timeout_s`; return `done()`."""
    deadline = time.monotonic() + timeout_s
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        executor.spin_once(timeout_sec=left)
    return True
