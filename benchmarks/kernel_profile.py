# SPDX-License-Identifier: Apache-2.0
"""Which kernels a GPU spends its time in: everything that this process runs there, whoever launched it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


class KernelProfile:
    """Between `start` and `stop`, as torch.profiler sees it (CUPTI). ImportError without PyTorch.

    Make it before anything is captured in a graph: CUPTI must be there to see the kernels of a graph one by
    one. `synchronize` waits for all work, so that what was queued before does not count.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        # CUPTI that is torn down and set up again does not get along with graphs that were recorded before.
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        import torch.profiler

        self._synchronize = synchronize
        self._torch = torch
        with self._profiler():  # the first one sets CUPTI up
            torch.zeros(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        self._running: Any = None

    def _profiler(self) -> Any:
        return self._torch.profiler.profile(activities=[self._torch.profiler.ProfilerActivity.CUDA])

    def start(self) -> None:
        self._synchronize()
        self._running = self._profiler()
        self._running.start()

    def stop(self, steps: int) -> list[Row]:
        """Kernels and copies, the longest first, per step: name, count, microseconds."""
        self._synchronize()
        self._running.stop()
        device = self._torch.autograd.DeviceType.CUDA
        found: dict[str, list[float]] = defaultdict(list)
        for event in self._running.events():
            if event.device_type == device:
                found[event.name].append(event.time_range.elapsed_us())
        rows = [
            {"name": name, "count": len(times) / steps, "us": sum(times) / steps}
            for name, times in found.items()
        ]
        return sorted(rows, key=lambda row: -row["us"])


def format_table(rows: list[Row]) -> str:
    """One line per kernel: per decode step, how often and how long."""
    total = sum(row["us"] for row in rows)
    lines = [f"{'us':>9}{'share':>7}{'count':>8}  kernel (per decode step; {total:.1f} us in kernels)"]
    lines += [
        f"{row['us']:>9.2f}{row['us'] / total:>7.1%}{row['count']:>8.1f}  {row['name'][:120]}" for row in rows
    ]
    return "\n".join(lines)
