# SPDX-License-Identifier: Apache-2.0
"""What every lifecycle node needs: logged exceptions, refused transitions, an end."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.signals import SignalHandlerOptions

from edgellm_ros.echo import escaped
from edgellm_ros.ros.executor import LeanExecutor
from edgellm_ros.ros.signals import call_on_signal, ignore_signals

NodeT = TypeVar("NodeT", bound=LifecycleNode)


def logged(transition: Callable) -> Callable:
    """Log the exception of a transition, which rclpy would hide."""

    @functools.wraps(transition)
    def wrapper(self: LifecycleNode, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            return transition(self, state)
        except Exception:
            self.get_logger().error(traceback.format_exc())
            raise

    return wrapper


def refuse_impossible_transitions(node: LifecycleNode) -> None:
    """Answer requests for a transition that the present state does not allow.

    rclpy would let the state machine's exception leave the service callback and end the node.
    """
    change_state = node._service_change_state.callback

    def guarded(request: Any, response: Any) -> Any:
        try:
            return change_state(request, response)
        except rclpy_implementation.RCLError as error:
            node.get_logger().warning(f"transition refused: {error}")
            response.success = False
            return response

    node._service_change_state.callback = guarded


def state_name(node: LifecycleNode) -> str:
    """Return the name of the lifecycle state."""
    return node._state_machine.current_state[1]


class Stop:
    """A request to end the process, from any thread; wakes the executors."""

    def __init__(self) -> None:
        self.executors: list[SingleThreadedExecutor] = []
        self._requested = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether the end was requested."""
        return self._requested.is_set()

    def request(self) -> None:
        """Request the end."""
        self._requested.set()
        for executor in self.executors:
            executor.wake()


def spin_once(node: LifecycleNode, executor: SingleThreadedExecutor, timeout_s: float | None = None) -> None:
    """Run one callback, and log its exception: one bad callback must not end the node."""
    try:
        executor.spin_once(timeout_sec=timeout_s)
    except Exception:
        node.get_logger().error(traceback.format_exc())


def run_process(
    executable: str,
    make_node: Callable[[], NodeT],
    run: Callable[[NodeT, SingleThreadedExecutor, Stop], None],
    args: Sequence[str] | None,
) -> int:
    """Make a node and run it in this process; return the exit code.

    args: as on the command line.
    """
    return run_nodes(executable, lambda: [make_node()], run, args)


def run_nodes(
    executable: str,
    make_nodes: Callable[[], list[NodeT]],
    run: Callable[[NodeT, SingleThreadedExecutor, Stop], None],
    args: Sequence[str] | None,
) -> int:
    """Make nodes and run each with an executor of its own; return the exit code.

    Of several nodes each has a thread. Signals only request the stop: rclpy's own signal handlers would
    invalidate the context at once, before a node has sent its last messages. args: as on the command line.
    """
    stop = Stop()
    call_on_signal(stop.request)
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    try:
        try:
            nodes = make_nodes()
        except Exception as error:  # rclpy has many classes for a parameter that it refuses
            print(f"{executable}: error: {escaped(str(error))}", file=sys.stderr)
            return 2
        for node in nodes:
            stop.executors.append(LeanExecutor())
            stop.executors[-1].add_node(node)
        try:
            _run_all(nodes, run, stop)
        finally:
            for executor in stop.executors:
                executor.shutdown()
            for node in nodes:
                node.destroy_node()
    finally:
        rclpy.try_shutdown()
        ignore_signals()
    return 0


def _run_all(
    nodes: Sequence[NodeT], run: Callable[[NodeT, SingleThreadedExecutor, Stop], None], stop: Stop
) -> None:
    """Run the nodes until all have ended; the first exception ends all of them."""
    jobs = list(zip(nodes, stop.executors, strict=True))
    if len(jobs) == 1:
        run(*jobs[0], stop)
        return
    with ThreadPoolExecutor(len(jobs)) as threads:
        futures = [threads.submit(run, *job, stop) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        stop.request()
    for future in futures:
        future.result()


def run_until_signal(
    executable: str, make_node: Callable[[], LifecycleNode], args: Sequence[str] | None
) -> int:
    """Run a lifecycle node with a parameter `autostart` until a signal comes.

    Returns the exit code. At the end the node is shut down, so that it ends its motion first. args: as on the
    command line.
    """
    return run_process(executable, make_node, _run, args)


def _run(node: LifecycleNode, executor: SingleThreadedExecutor, stop: Stop) -> None:
    if node.get_parameter("autostart").value and not stop.requested:
        configured = node.trigger_configure()
        if configured == TransitionCallbackReturn.SUCCESS:
            node.trigger_activate()
    while not stop.requested:
        spin_once(node, executor)
    if state_name(node) != "finalized":
        node.trigger_shutdown()
