# SPDX-License-Identifier: Apache-2.0
"""Runs the node as a process: `edgellm_node` under ROS, `python -m edgellm_ros.ros.node.main` anywhere.

SIGINT and SIGTERM end it with exit code 0, after the running goals have got their results. rclpy's own
handlers would invalidate the context first, and then no client could be told anything.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.signals import SignalHandlerOptions

from edgellm_ros.ros.node.node import EdgeLLMNode

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAREWELL_S = 1.0  # at most, until goals that ran when the signal came have their results
DELIVERY_S = 0.1  # for these results to leave


def main(args: Sequence[str] | None = None) -> int:
    """Run the node until a signal comes; returns the exit code. `args` as on the command line."""
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        try:
            node = EdgeLLMNode()
        except Exception as error:  # a parameter of the wrong type or out of range has one of many classes
            print(f"edgellm_node: error: {error}", file=sys.stderr)
            return 2
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        try:
            _run(node, executor)
        finally:
            executor.shutdown()
            node.destroy_node()
    finally:
        rclpy.try_shutdown()
    return 0


def _run(node: EdgeLLMNode, executor: SingleThreadedExecutor) -> None:
    stop = threading.Event()

    def on_signal() -> None:
        stop.set()
        executor.wake()

    _call_on_signal(on_signal)
    if node.parameters.autostart and node.trigger_configure() == TransitionCallbackReturn.SUCCESS:
        node.trigger_activate()
    while not stop.is_set():
        _spin_once(node, executor)
    if node.goals_in_progress:
        node.stop_planning("the node shuts down")
        _spin_while(node, executor, lambda: node.goals_in_progress > 0, FAREWELL_S)
        _spin_while(node, executor, lambda: True, DELIVERY_S)
    if node.state != "finalized":
        node.trigger_shutdown()


def _call_on_signal(callback: Callable[[], None]) -> None:
    """Call back from another thread at the first signal; the second one kills.

    The main thread waits inside the middleware, where Python's own handlers do not run. The wakeup file
    descriptor is written from the C handler, in whichever thread the signal arrives.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: signal.signal(number, signal.SIG_DFL))
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def wait() -> None:
        with reader, writer:
            reader.recv(1)
            callback()

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _spin_while(
    node: EdgeLLMNode, executor: SingleThreadedExecutor, condition: Callable[[], bool], timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    while condition() and (left := end - time.monotonic()) > 0:
        _spin_once(node, executor, left)


def _spin_once(node: EdgeLLMNode, executor: SingleThreadedExecutor, timeout_s: float | None = None) -> None:
    """Run one callback. What it raises is logged: one bad callback must not end the node."""
    try:
        executor.spin_once(timeout_sec=timeout_s)
    except Exception:
        node.get_logger().error(traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
