# SPDX-License-Identifier: Apache-2.0
"""Waiting for messages on the caller's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rclpy.executors import Executor


def spin_until(executor: Executor, done: Callable[[], Any], timeout_s: float) -> bool:
    """Let messages come in until `done()` or for `timeout_s`; returns whether it is."""
    deadline = time.monotonic() + timeout_s
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        executor.spin_once(timeout_sec=left)
    return True
