# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals against published ones, and percentiles."""

from __future__ import annotations

import pytest

from edgellm_ros.evaluation.shares import Share, spread_of


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # method 3 of table I in R. G. Newcombe, "Two-sided confidence intervals for the single proportion", 1998
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_that_of_the_literature(count, of, low, high):
    assert Share(count, of).interval == pytest.approx((low, high), abs=5e-5)


def test_the_interval_of_failures_mirrors_that_of_successes():
    low, high = Share(29, 29 + 3).interval
    assert Share(3, 29 + 3).interval == pytest.approx((1 - high, 1 - low))


def test_without_trials_nothing_is_known():
    assert (Share(0, 0).value, Share(0, 0).interval, str(Share(0, 0))) == (None, (0.0, 1.0), "0 of 0")


def test_a_spread_has_the_nearest_ranks():
    spread = spread_of(range(200, 0, -1))
    assert spread == {"median": 100, "p90": 180, "p99": 198, "max": 200}
    assert spread_of([]) is None
