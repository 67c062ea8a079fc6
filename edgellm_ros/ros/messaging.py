# SPDX-License-Identifier: Apache-2.0
"""ROS helpers of every room: times in nanoseconds, QoS of services, and waiting for messages."""

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
    """Convert nanoseconds to a ROS time; beyond what it can hold, the nearest one (its seconds are int32)."""
    stamp = min(max(stamp, MIN_TIME), MAX_TIME)
    return Time(sec=stamp // NANOSECONDS, nanosec=stamp % NANOSECONDS)


def to_nanoseconds(stamp: Time) -> int:
    """Convert a ROS time to nanoseconds, without rounding."""
    return stamp.sec * NANOSECONDS + stamp.nanosec


def services_qos(depth: int = SERVICE_DEPTH) -> QoSProfile:
    """Return the QoS of a service, or of its client, that holds `depth` requests or answers."""
    return QoSProfile(depth=depth)


def action_services_qos(depth: int = SERVICE_DEPTH) -> dict[str, QoSProfile]:
    """Return the arguments that give the services of an ActionServer or ActionClient this depth.

    The clients of a service share one topic for its answers: each one's reader holds the answers to all.
    """
    names = ("goal", "result", "cancel")
    return {f"{name}_service_qos_profile": services_qos(depth) for name in names}


def spin_until(executor: Executor, done: Callable[[], Any], timeout_s: float) -> bool:
    """Run callbacks on this thread until `done()` or for `timeout_s`; return whether it is done."""
    deadline = time.monotonic() + timeout_s
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        executor.spin_once(timeout_sec=left)
    return True
