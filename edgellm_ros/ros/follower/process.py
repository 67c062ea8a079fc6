# SPDX-License-Identifier: Apache-2.0
"""Runs the follower until a signal comes.

SIGINT and SIGTERM end the node with exit code 0, after the robot was braked to a standstill. rclpy's own
signal handlers would invalidate the context first, so that no command could be sent. Further signals within
2 s are ignored; a later signal ends the process at once (exit code 128 + signal).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.ros.follower.node import FollowerNode
from edgellm_ros.ros.lifecycle import run_until_signal


def run(args: Sequence[str] | None = None) -> int:
    """Run the node until a signal comes, and return the exit code.

    `args` as on the command line.
    """
    return run_until_signal("follower_node", FollowerNode, args)
