# SPDX-License-Identifier: Apache-2.0
"""An executor that takes little of the interpreter's time per callback."""

from __future__ import annotations

import threading
import time
from typing import Any

from rclpy.context import Context
from rclpy.event_handler import EventHandler
from rclpy.executors import SingleThreadedExecutor
from rclpy.guard_condition import GuardCondition
from rclpy.node import Node

EVENTS_PERIOD_S = 1.0


class LeanExecutor(SingleThreadedExecutor):
    """A SingleThreadedExecutor with fewer and smaller wait sets.

    rclpy makes a wait set before each wait, in Python, while the thread that plans needs the interpreter. It
    makes two per callback, because every callback wakes the executor that has just run it, and more than
    half of each are the QoS events of publishers and subscriptions. Here only other threads wake the
    executor, and one wait set per `EVENTS_PERIOD_S` contains QoS events: a warning of incompatible QoS may
    come so much later, with the next wait set.
    """

    def __init__(self, *, context: Context | None = None) -> None:
        super().__init__(context=context)
        self._guard.destroy()
        self._guard = _WakeFromOtherThreads(callback=None, callback_group=None, context=self._context)
        self._waits_for_events = True
        self._next_events = 0.0

    def spin_once(self, timeout_sec: float | None = None) -> None:
        """Wait for one callback and run it, for at most `timeout_sec`; None = forever."""
        self._guard.spinner = threading.get_ident()
        super().spin_once(timeout_sec)

    def get_nodes(self) -> list[Node]:
        """Return the nodes; rclpy asks for them before it makes a wait set."""
        now = time.monotonic()
        self._waits_for_events = now >= self._next_events
        if self._waits_for_events:
            self._next_events = now + EVENTS_PERIOD_S
        return super().get_nodes()

    def can_execute(self, entity: Any) -> bool:
        """Tell whether the next wait set contains an entity."""
        if isinstance(entity, EventHandler) and not self._waits_for_events:
            return False
        return super().can_execute(entity)


class _WakeFromOtherThreads(GuardCondition):
    """Wakes the executor, except from its own thread, which does not wait then."""

    spinner: int | None = None  # the thread that spins

    def trigger(self) -> None:
        if threading.get_ident() != self.spinner:
            super().trigger()
