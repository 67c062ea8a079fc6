# SPDX-License-Identifier: Apache-2.0
"""Runs the node `edgellm_arm` until a signal comes.

SIGINT and SIGTERM end the node with exit code 0, after the arm was braked to a standstill.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.ros.arm.node import ArmNode
from edgellm_ros.ros.lifecycle import run_until_signal


def run(args: Sequence[str] | None = None) -> int:
    """Run the node until a signal comes, and return the exit code.

    `args` as on the command line.
    """
    return run_until_signal("arm_node", ArmNode, args)
