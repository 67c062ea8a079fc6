# SPDX-License-Identifier: Apache-2.0
"""Work that its caller may stop waiting for.

For long calls of a library, such as the compilation of a grammar. The work runs on one of a few threads while
the caller asks every POLL_S whether to stop. Work that has begun ends by itself on its thread: until then,
other work waits for a free thread, and does not run beside it on more and more threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

THREADS = 2
POLL_S = 0.02

T = TypeVar("T")


class InterruptedWorkError(Exception):
    """The caller has stopped waiting."""


def interruptible(work: Callable[[], T], stopped: Callable[[], bool]) -> T:
    """Run `work` on another thread and return its result.

    Raises what `work` and `stopped` raise, and InterruptedWorkError once `stopped` returns True. `work` does
    not call this function.
    """
    future = _threads().submit(work)
    try:
        while not wait([future], POLL_S).done:
            if stopped():
                raise InterruptedWorkError
        return future.result()
    finally:
        future.cancel()  # if it has not begun


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "edgellm-interruptible")
