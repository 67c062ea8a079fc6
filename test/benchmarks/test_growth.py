# SPDX-License-Identifier: Apache-2.0
"""The growth rate of the soak test: a leak in memory that wavers is found.

Memory that only wavers is no leak.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.growth import growth_rate
from benchmarks.memory import read_memory

PERIOD, CYCLES = 20, 1000
PLANS = np.arange(CYCLES)


def wavering(rng: np.random.Generator) -> np.ndarray:
    """Return the bytes of each moment: its own need, noise and outliers."""
    sizes = 200e6 + np.tile(rng.uniform(0, 30e3, PERIOD), CYCLES // PERIOD) + rng.normal(0, 5e3, CYCLES)
    sizes[rng.choice(CYCLES, 10)] += 4e6
    return sizes


@pytest.mark.parametrize("leak", [0, 100, 1000, -50])
def test_bytes_per_plan_are_found_under_what_wavers(leak):
    rng = np.random.default_rng(1)
    assert growth_rate(PLANS, wavering(rng) + leak * PLANS, PERIOD) == pytest.approx(leak, abs=20)


def test_a_single_step_is_no_growth():
    sizes = wavering(np.random.default_rng(2)) + 2e6 * (PLANS > 900)
    assert abs(growth_rate(PLANS, sizes, PERIOD)) < 20


def test_memory_that_settles_in_the_first_third_is_no_growth():
    sizes = wavering(np.random.default_rng(3)) - 1e6 * np.exp(-PLANS / 50)
    assert growth_rate(PLANS[CYCLES // 2 :], sizes[CYCLES // 2 :], PERIOD) < 20


@pytest.mark.parametrize(
    ("progress", "sizes"), [([1] * 30, [1] * 30), ([1] * 50, [1] * 40), ([1] * 40, [1] * 40)]
)
def test_too_few_readings_are_refused(progress, sizes):
    with pytest.raises(ValueError, match=r"expected two|expected rising"):
        growth_rate(progress, sizes, PERIOD)


@pytest.mark.slow
def test_what_is_allocated_is_counted_to_the_byte_and_what_was_freed_no_more():
    before = read_memory().allocated
    blocks = [bytes(2000) for _ in range(1000)]  # beyond Python's own allocator
    during = read_memory().allocated
    del blocks
    assert 2000e3 < during - before < 2100e3
    assert abs(read_memory().allocated - before) < 20e3
