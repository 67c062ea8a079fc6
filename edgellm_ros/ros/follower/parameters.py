# SPDX-License-Identifier: Apache-2.0
"""Parameters of the follower: table of declarations, checks, and the settings that they make."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from edgellm_ros.echo import quoted
from edgellm_ros.ros.follower.course import Limits
from edgellm_ros.ros.follower.trajectory_follower import Settings

FRAME_ID = re.compile(r"[^/\s\x00-\x1f\x7f][^\s\x00-\x1f\x7f]*")  # tf2: not empty, no leading "/"


@dataclass(frozen=True)
class Spec:
    """Declaration of one parameter."""

    default: bool | int | float | str
    description: str  # read alone, by `ros2 param describe`
    low: float | None = None  # lowest and highest value allowed
    high: float | None = None
    fixed: bool = False  # can only be set while the node is unconfigured
    read_only: bool = False  # can only be set at start


SPECS: dict[str, Spec] = {
    "autostart": Spec(
        False,
        "Configure and activate the node at start; false = a lifecycle manager does it.",
        read_only=True,
    ),
    "rate": Spec(20.0, "Commands per second.", 5.0, 200.0, fixed=True),
    "stamped": Spec(
        False, "Message type of ~/cmd_vel; true = geometry_msgs/TwistStamped, false = Twist.", fixed=True
    ),
    "frame_id": Spec("base_link", "TF frame of ~/path and of stamped commands: the base of the robot."),
    "sample_index": Spec(0, "Which of a plan's samples is followed; others are ignored.", 0, 65535),
    "max_speed": Spec(0.8, "Highest speed in m/s.", 0.01, 50.0),
    "max_acceleration": Spec(1.0, "Highest acceleration in m/s^2.", 0.01, 50.0),
    "max_deceleration": Spec(1.5, "Highest deceleration in m/s^2; stops use it.", 0.05, 50.0),
    "max_curvature": Spec(2.5, "Highest curvature in 1/m, to either side.", 0.01, 100.0),
    "max_lateral_acceleration": Spec(
        2.0,
        "Highest lateral acceleration (speed^2 * curvature) in m/s^2; the robot slows down for it, and "
        "widens a curve that it cannot slow down for in time.",
        0.01,
        100.0,
    ),
    "blend_time": Spec(0.3, "Time in seconds to pass from one chunk to the next.", 0.0, 10.0),
    "max_chunk_age": Spec(
        2.0, "Age of a chunk's frame in seconds from which the chunk is not followed; then the robot brakes.",
        0.1, 60.0,
    ),
    "future_stamp_tolerance": Spec(
        0.5, "Time in seconds that chunks and odometry may be stamped ahead of the node's clock.", 0.0, 10.0
    ),
}  # fmt: skip


def declare_parameters(node: Node) -> None:
    """Declare every parameter of the table.

    Raises ValueError for a value at start that is not allowed.
    """
    for name, spec in SPECS.items():
        node.declare_parameter(name, spec.default, _descriptor(name, spec))
        problem = _problem(name, node.get_parameter(name).value)
        if problem:
            raise ValueError(problem)


def check_parameters(changes: list[Parameter], configured: bool) -> SetParametersResult:
    """Check new values, for `add_on_set_parameters_callback`.

    `configured`: fixed parameters may not change.
    """
    for change in changes:
        spec = SPECS.get(change.name)
        if spec is None:
            continue
        problem = _problem(change.name, change.value)
        if spec.fixed and configured:
            problem = f"{change.name} can only be set while the node is unconfigured: clean it up first"
        if problem:
            return SetParametersResult(successful=False, reason=problem)
    return SetParametersResult(successful=True)


def read_settings(node: Node) -> Settings:
    """Return the settings that the node's parameters make."""

    def value(name: str) -> float:
        return node.get_parameter(name).value

    limits = Limits(
        speed=value("max_speed"),
        acceleration=value("max_acceleration"),
        deceleration=value("max_deceleration"),
        curvature=value("max_curvature"),
        lateral_acceleration=value("max_lateral_acceleration"),
    )
    return Settings(
        limits=limits,
        period=1.0 / value("rate"),
        blend_time=value("blend_time"),
        max_chunk_age=value("max_chunk_age"),
        future_tolerance=value("future_stamp_tolerance"),
    )


def _problem(name: str, value: Any) -> str:
    """Return the reason why a value is not allowed; empty if the value is allowed."""
    spec = SPECS[name]
    # rclpy's own check of ranges accepts NaN, and values up to a millionth outside.
    if spec.low is not None and spec.high is not None and not spec.low <= value <= spec.high:
        return f"{name} must be from {spec.low} to {spec.high}, got {value}"
    if name == "frame_id" and not FRAME_ID.fullmatch(value):
        return f"frame_id must be a TF frame: not empty, no leading '/', no white space, got {quoted(value)}"
    return ""


def _descriptor(name: str, spec: Spec) -> ParameterDescriptor:
    descriptor = ParameterDescriptor(name=name, description=spec.description, read_only=spec.read_only)
    if spec.fixed:
        descriptor.additional_constraints = "Can only be set while the node is unconfigured."
    if spec.low is not None and spec.high is not None:
        if isinstance(spec.default, float):
            bounds = FloatingPointRange(from_value=float(spec.low), to_value=float(spec.high))
            descriptor.floating_point_range.append(bounds)
        else:
            descriptor.integer_range.append(
                IntegerRange(from_value=int(spec.low), to_value=int(spec.high), step=1)
            )
    return descriptor
