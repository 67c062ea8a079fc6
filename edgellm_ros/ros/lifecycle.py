# SPDX-License-Identifier: Apache-2.0
"""What every lifecycle node of this package needs: logged exceptions, refused transitions, an end."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from typing import Any

from rclpy.executors import SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn


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
    """A request to end the node, from any thread; wakes the executor."""

    def __init__(self) -> None:
        self.executor: SingleThreadedExecutor | None = None
        self._requested = threading.Event()

    @property
    def requested(self) -> bool:
        """Whether the end of the node was requested."""
        return self._requested.is_set()

    def request(self) -> None:
        """Request the end of the node."""
        self._requested.set()
        if self.executor is not None:
            self.executor.wake()


def spin_once(node: LifecycleNode, executor: SingleThreadedExecutor, timeout_s: float | None = None) -> None:
    """Run one callback, and log its exception: one bad callback must not end the node."""
    try:
        executor.spin_once(timeout_sec=timeout_s)
    except Exception:
        node.get_logger().error(traceback.format_exc())
