# SPDX-License-Identifier: Apache-2.0
"""The thread that shows plans to people: pictures do not delay the next plan."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable

from rclpy.impl.rcutils_logger import RcutilsLogger

from edgellm_ros.ros.node.plan import Plan


class Display:
    """Runs `show(plan, is_newest)` for one plan after another on its own thread.

    `is_newest`: no later plan waits to be shown. An exception of `show` is logged, and the next plan is
    shown.
    """

    def __init__(self, show: Callable[[Plan, bool], None], logger: RcutilsLogger) -> None:
        self._show = show
        self._logger = logger
        self._changed = threading.Condition()
        self._plans: deque[Plan] = deque()  # the first one is being shown
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="edgellm-display")
        self._thread.start()

    @property
    def pending(self) -> int:
        """Number of plans that wait or are being shown."""
        return len(self._plans)

    def add(self, plan: Plan) -> None:
        """Show a plan after those that wait; after `close`, do nothing."""
        with self._changed:
            if self._closed:
                return
            self._plans.append(plan)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all plans have been shown."""
        with self._changed:
            self._changed.wait_for(lambda: not self._plans)

    def close(self) -> None:
        """Show the plans that wait, then end the thread; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._plans)
                if not self._plans:
                    return
                plan, is_newest = self._plans[0], len(self._plans) == 1
            try:
                self._show(plan, is_newest)
            except Exception:
                self._logger.error(traceback.format_exc())
            del plan  # frees its frame while the thread waits
            with self._changed:
                self._plans.popleft()
                self._changed.notify_all()
