# SPDX-License-Identifier: Apache-2.0
"""The follower's parameters: table of declarations, resulting settings."""

from __future__ import annotations

from rclpy.node import Node

from edgellm_ros.ros.chunk_checks import MAX_ROWS
from edgellm_ros.ros.follower.course import Limits
from edgellm_ros.ros.follower.trajectory_follower import Settings
from edgellm_ros.ros.parameter_table import Spec

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
    "max_chunk_rows": Spec(
        MAX_ROWS, "Most rows of a chunk; a longer one, which would delay commands, is refused.", 1, 100_000
    ),
    "future_stamp_tolerance": Spec(
        0.5, "Time in seconds that chunks and odometry may be stamped ahead of the node's clock.", 0.0, 10.0
    ),
}  # fmt: skip


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
