# SPDX-License-Identifier: Apache-2.0
"""Values on /diagnostics keep their digits."""

from __future__ import annotations

import math

import pytest

from edgellm_ros.ros.node.diagnostics import plan_status
from edgellm_ros.ros.node.metrics import NodeMetrics


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1763779123.456789, "1763779123.456789"),  # a clock, in seconds
        (1234567891.0, "1234567891"),  # bytes of memory
        (12345678.0, "12345678"),  # a counter
        (0.012345678, "0.012346"),  # a latency, to the microsecond
        (29.97, "29.97"),  # a rate
        (0.0, "0"),
        (1e-9, "0"),
        (math.inf, "inf"),  # the age of what never came
    ],
)
def test_values_are_not_rounded_to_six_digits(value, text):
    status = plan_status(NodeMetrics(), {"value": value})
    assert {pair.key: pair.value for pair in status.values} == {"value": text}
