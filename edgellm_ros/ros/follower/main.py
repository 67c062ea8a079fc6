# SPDX-License-Identifier: Apache-2.0
"""Runs the follower as a process: `follower_node`, or the module itself.

SIGINT and SIGTERM end the node with exit code 0, after the robot was braked to a standstill. rclpy's own
signal handlers would invalidate the context first, so that no command could be sent. Further signals within
2 s are ignored; a later signal ends the process at once (exit code 128 + signal).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.signals import SignalHandlerOptions

from edgellm_ros.echo import escaped
from edgellm_ros.ros.follower.node import FollowerNode
from edgellm_ros.ros.lifecycle import Stop, spin_once
from edgellm_ros.ros.signals import call_on_signal, ignore_signals


def main(args: Sequence[str] | None = None) -> int:
    """Run the node until a signal comes, and return the exit code.

    `args` as on the command line.
    """
    stop = Stop()
    call_on_signal(stop.request)
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        try:
            node = FollowerNode()
        except Exception as error:  # rclpy has many classes for a parameter that it refuses
            print(f"follower_node: error: {escaped(str(error))}", file=sys.stderr)
            return 2
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        stop.executor = executor
        try:
            if node.get_parameter("autostart").value and not stop.requested:
                configured = node.trigger_configure()
                if configured == TransitionCallbackReturn.SUCCESS:
                    node.trigger_activate()
            while not stop.requested:
                spin_once(node, executor)
            if node.state != "finalized":
                node.trigger_shutdown()
        finally:
            executor.shutdown()
            node.destroy_node()
    finally:
        rclpy.try_shutdown()
        ignore_signals()
    return 0


if __name__ == "__main__":
    sys.exit(main())
