# SPDX-License-Identifier: Apache-2.0
"""Units of the joints: LeRobot's of an SO-101, and radians of the simulation.

LeRobot's are degrees, and percent of the opening for the gripper: 0 = closed, 100 = open.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
NAMES = tuple(f"{joint}.pos" for joint in JOINTS)  # of LeRobot's features
GRIPPER = JOINTS.index("gripper")


def to_policy(radians: NDArray, gripper_range: tuple[float, float]) -> NDArray[np.float32]:
    """Convert joint positions [..., 6] of the simulation to LeRobot's units.

    gripper_range: radians of the closed and of the open gripper.
    """
    closed, opened = gripper_range
    values = np.degrees(radians)
    values[..., GRIPPER] = 100 * (radians[..., GRIPPER] - closed) / (opened - closed)
    return values.astype(np.float32)


def to_radians(values: NDArray, gripper_range: tuple[float, float]) -> NDArray[np.float64]:
    """Convert joint positions [..., 6] in LeRobot's units to radians; see `to_policy`."""
    closed, opened = gripper_range
    radians = np.radians(np.asarray(values, np.float64))
    radians[..., GRIPPER] = closed + (opened - closed) * np.asarray(values)[..., GRIPPER] / 100
    return radians
