# SPDX-License-Identifier: Apache-2.0
"""Compares fused kernels with the engine: results and times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError

Output = TypeVar("Output")

RUNS = 5  # whose median is compared
LARGEST_DIFFERENCE = 0.25  # root mean square of the differences, relative to that of the engine's results


def disagreement(engine: np.ndarray, fused: np.ndarray, repeated: Iterable[np.ndarray]) -> str:
    """Return what is wrong with results of the fused kernels; "" = nothing.

    repeated: results of later runs, which must have the same bits.
    """
    found, expected = fused.astype(np.float64), engine.astype(np.float64)
    difference, size = (float(np.sqrt(np.mean(x**2))) for x in (found - expected, expected))
    if not difference <= LARGEST_DIFFERENCE * size:
        return f"differ from the engine's by {difference:.3g}, of a root mean square of {size:.3g}"
    return "" if all(np.array_equal(fused, each) for each in repeated) else "differ from run to run"


class Switchable(Protocol):
    """Runs in the fused kernels or in the engine."""

    uses_fused: bool


class Comparison(NamedTuple):
    """Seconds of a run of each, or what is wrong with the kernels; "" = nothing."""

    engine: float = 0.0
    fused: float = 0.0
    problem: str = ""


def choose(
    device: Device, runner: Switchable, run: Callable[[], Output], read: Callable[[Output], np.ndarray]
) -> Comparison:
    """Let a runner use its fused kernels if they are faster than the engine.

    The kernels are not used if their results differ from the engine's, or from run to run.

    - run: queues a run
    - read: returns its results
    """
    seconds, results = list[float](), list[list[np.ndarray]]()
    try:
        for fused in (False, True):
            runner.uses_fused = fused
            times, found = [], []
            for _ in range(RUNS + 2):  # one of the first two is recorded
                device.synchronize()
                start = time.perf_counter()
                output = run()
                device.synchronize()
                times.append(time.perf_counter() - start)
                found.append(read(output))
            seconds.append(statistics.median(times[2:]))
            results.append(found)
        problem = disagreement(results[0][-1], results[1][0], results[1][1:])
    except DeviceLostError:
        raise
    except EngineError as error:
        problem = f"failed: {error}"
    runner.uses_fused = not problem and seconds[1] < seconds[0]
    return Comparison(problem=problem) if problem else Comparison(seconds[0], seconds[1])
