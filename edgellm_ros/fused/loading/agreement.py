# SPDX-License-Identifier: Apache-2.0
"""Compares results of fused kernels with the engine's, if `decode` is "auto"."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

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
