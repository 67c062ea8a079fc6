# SPDX-License-Identifier: Apache-2.0
"""Runs the node until a signal comes.

SIGINT and SIGTERM end the node with exit code 0, after the clients of running goals have received their
results. rclpy's own signal handlers would invalidate the context first, so that no result could be sent.
Further signals within 2 s are ignored; a later signal ends the process at once (exit code 128 + signal).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn

from edgellm_ros.ros.lifecycle import Stop, run_process, spin_once
from edgellm_ros.ros.node.node import EdgeLLMNode

FAREWELL_S = 1.0  # at most, for running goals to end
# From the end of a goal to the end of the process: for its client to ask for the result and to take it. What
# the client has received and not yet taken is lost when the node goes.
DELIVERY_S = 1.0


def run(args: Sequence[str] | None = None) -> int:
    """Run the node until a signal comes, and return the exit code.

    `args` as on the command line.
    """
    return run_process("edgellm_node", EdgeLLMNode, run_node, args)


def run_node(node: EdgeLLMNode, executor: SingleThreadedExecutor, stop: Stop) -> None:
    """Run a node until the stop is requested, then end its goals and shut it down."""
    if node.parameters.autostart and not stop.requested:
        configured = node.trigger_configure()  # loads engines: may take long
        if configured == TransitionCallbackReturn.SUCCESS and not stop.requested:
            node.trigger_activate()
    while not stop.requested:
        spin_once(node, executor)
    if node.goals_in_progress:
        node.stop_planning("the node shuts down")
        _spin_while(node, executor, lambda: node.goals_in_progress > 0, FAREWELL_S)
    _spin_while(node, executor, lambda: node.since_last_goal < DELIVERY_S, DELIVERY_S)
    if node.state != "finalized":
        node.trigger_shutdown()


def _spin_while(
    node: EdgeLLMNode, executor: SingleThreadedExecutor, condition: Callable[[], bool], timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    while condition() and (left := end - time.monotonic()) > 0:
        spin_once(node, executor, left)
