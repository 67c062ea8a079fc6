# SPDX-License-Identifier: Apache-2.0
"""ROS helpers: times in ns, QoS of topics and services, waiting for messages."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from typing import Any

from builtin_interfaces.msg import Time
from rclpy.executors import Executor
from rclpy.node import Node
from rclpy.qos import QoSPolicyKind, QoSProfile
from rclpy.qos_overriding_options import QoSOverridingOptions

from edgellm_ros.echo import quoted

NANOSECONDS = 1_000_000_000
SERVICE_DEPTH = 100  # ROS's default of 10 loses requests and answers when many clients call at once
# Policies of topics that parameters may override, with their values; DEPTH is a number.
POLICIES = {
    QoSPolicyKind.HISTORY: ("keep_last", "keep_all", "system_default"),
    QoSPolicyKind.DEPTH: (),
    QoSPolicyKind.RELIABILITY: ("reliable", "best_effort", "system_default"),
    QoSPolicyKind.DURABILITY: ("volatile", "transient_local", "system_default"),
}
OVERRIDE = re.compile(r"qos_overrides\.(/[^.]+)\.(publisher|subscription)\.(\w+)")
MIN_TIME, MAX_TIME = -(2**31) * NANOSECONDS, 2**31 * NANOSECONDS - 1


def to_time(stamp: int) -> Time:
    """Convert nanoseconds to the nearest ROS time (whose seconds are int32)."""
    stamp = min(max(stamp, MIN_TIME), MAX_TIME)
    return Time(sec=stamp // NANOSECONDS, nanosec=stamp % NANOSECONDS)


def to_nanoseconds(stamp: Time) -> int:
    """Convert a ROS time to nanoseconds, without rounding."""
    return stamp.sec * NANOSECONDS + stamp.nanosec


def overridable(qos: QoSProfile) -> dict[str, Any]:
    """Return arguments for a publisher or subscription: its overridable QoS.

    Users set the parameters `qos_overrides.<topic>.publisher.reliability` and so on.
    """
    # A copy: rclpy writes the values of these parameters into the profile.
    return {"qos_profile": copy.copy(qos), "qos_overriding_options": QoSOverridingOptions(POLICIES)}


def check_qos_overrides(node: Node) -> None:
    """Raise ValueError for an unknown override of a topic's QoS, or a wrong value.

    rclpy would raise an exception when the topic is made, and ignore other policies.
    """
    values = {policy.name.lower(): choices for policy, choices in POLICIES.items()}
    for name, parameter in node._parameter_overrides.items():
        if not name.startswith("qos_overrides."):
            continue
        match = OVERRIDE.fullmatch(name)
        if match is None or match[3] not in values:
            raise ValueError(
                f"{quoted(name)} must be qos_overrides.TOPIC.publisher.POLICY or "
                f"qos_overrides.TOPIC.subscription.POLICY with a policy of {', '.join(values)}"
            )
        choices, value = values[match[3]], parameter.value
        if choices and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {quoted(value)}")
        if not choices and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {quoted(value)}")


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
