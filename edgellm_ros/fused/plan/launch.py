# SPDX-License-Identifier: Apache-2.0
"""Launch: how a kernel is launched."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine.errors import EngineError

WARP = 32
OLDEST = 80  # compute capability 8.0: cp.async, bf16


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    - early: the kernel may start before the previous one has ended, and waits for that itself (PDL)
    - cluster: CTAs of a thread block cluster, neighbours along the first axis of the grid
    """

    name: str
    grid: tuple[int, int]
    threads: int
    shared: int = 0
    early: bool = False
    cluster: int = 1


def too_little_smem(needed: int, most: int) -> EngineError:
    """Return the error of kernels that do not fit into an SM; both are bytes."""
    return EngineError(f"no kernels for many tokens: a block needs {needed} of {most} bytes of shared memory")
