# SPDX-License-Identifier: Apache-2.0
"""The arm node's parameters: table of declarations, resulting settings."""

from __future__ import annotations

from rclpy.node import Node

from edgellm_ros.ros.arm.arm_follower import Settings
from edgellm_ros.ros.chunk_checks import MAX_ROWS
from edgellm_ros.ros.parameter_table import Spec

SPECS: dict[str, Spec] = {
    "autostart": Spec(
        False,
        "Configure and activate the node at start; false = a lifecycle manager does it.",
        read_only=True,
    ),
    "contract": Spec("", "YAML file with joints, units, limits and topics, as in docs/arm.md.", fixed=True),
    "engine_dir": Spec(
        "", "Engine directory of the policy, whose names are compared with the contract's.", fixed=True
    ),
    "dry_run": Spec(
        True, "Publish what would be sent on ~/preview alone; nothing moves. false = move.", fixed=True
    ),
    "sample_index": Spec(0, "Which of a plan's samples is followed; others are ignored.", 0, 65535),
    "blend_time": Spec(0.2, "Time in seconds to pass from one chunk to the next.", 0.0, 10.0),
    "follow_time": Spec(
        0.0,
        "Time in seconds for which a chunk is followed. Then the arm rests until a chunk of a frame at which "
        "it stood; 0 = follow each chunk until the next.",
        0.0,
        60.0,
    ),
    "temporal_ensembling": Spec(
        False, "Follow the weighted mean of all chunks that predict one time, in place of the newest chunk."
    ),
    "temporal_ensemble_coeff": Spec(
        0.01,
        "m of temporal ensembling: of the chunks for one time, chunk i has the weight exp(-m i), the oldest "
        "is 0.",
        -1.0,
        1.0,
    ),
    "max_chunk_age": Spec(
        2.0,
        "Age of a chunk's frame in seconds at which the arm rests unless a new chunk came.",
        0.1,
        60.0,
        fixed=True,
    ),
    "max_state_age": Spec(
        0.2, "Age of joint states in seconds from which the arm brakes and no chunk is followed.", 0.02, 10.0
    ),
    "max_chunk_rows": Spec(MAX_ROWS, "Most rows of a chunk; a longer one is refused.", 1, 100_000),
    "future_stamp_tolerance": Spec(
        0.5, "Time in seconds that chunks may be stamped ahead of the node's clock.", 0.0, 10.0
    ),
}


def read_settings(node: Node) -> Settings:
    """Return the settings that the node's parameters make."""
    ensembling = node.get_parameter("temporal_ensembling").value
    return Settings(
        blend_time=node.get_parameter("blend_time").value,
        max_chunk_age=node.get_parameter("max_chunk_age").value,
        max_state_age=node.get_parameter("max_state_age").value,
        future_tolerance=node.get_parameter("future_stamp_tolerance").value,
        dry_run=node.get_parameter("dry_run").value,
        follow_time=node.get_parameter("follow_time").value,
        ensemble_coeff=node.get_parameter("temporal_ensemble_coeff").value if ensembling else None,
    )
