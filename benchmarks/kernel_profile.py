# SPDX-License-Identifier: Apache-2.0
"""Profile of all kernels that this process runs on a GPU, whoever launches them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]


class Event(NamedTuple):
    """A kernel or a copy; times in microseconds."""

    name: str
    start: float
    end: float


class KernelProfile:
    """Profiles the time between `start` and `stop` with torch.profiler (CUPTI).

    Create it before any graph is captured: CUPTI must be active to see the kernels of a graph separately.
    `synchronize` waits for all queued work, so that earlier work does not count. ImportError without PyTorch.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        # If CUPTI is torn down and set up again, it does not work with graphs captured before.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        import torch.profiler

        self._synchronize = synchronize
        self._torch = torch
        with self._profiler():  # the first profiler initialises CUPTI
            torch.zeros(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        self._running: Any = None

    def _profiler(self) -> Any:
        return self._torch.profiler.profile(activities=[self._torch.profiler.ProfilerActivity.CUDA])

    def start(self) -> None:
        self._synchronize()
        self._running = self._profiler()
        self._running.start()

    def stop(self) -> list[Event]:
        """Return kernels and copies in the order of their starts."""
        self._synchronize()
        self._running.stop()
        device = self._torch.autograd.DeviceType.CUDA
        events = [event for event in self._running.events() if event.device_type == device]
        found = [Event(event.name, event.time_range.start, event.time_range.end) for event in events]
        return sorted(found, key=lambda event: event.start)


def rows_of(events: list[Event], steps: int) -> list[Row]:
    """Return name, count and microseconds of kernels and copies per step.

    The longest come first.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append(event.end - event.start)
    rows = [
        {"name": name, "count": len(times) / steps, "us": sum(times) / steps} for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def format_table(rows: list[Row]) -> str:
    """Format one line per kernel: time and count per decode step."""
    total = sum(row["us"] for row in rows)
    lines = [f"{'us':>9}{'share':>7}{'count':>8}  kernel (per decode step; {total:.1f} us in kernels)"]
    lines += [
        f"{row['us']:>9.2f}{row['us'] / total:>7.1%}{row['count']:>8.1f}  {row['name'][:120]}" for row in rows
    ]
    return "\n".join(lines)
