# SPDX-License-Identifier: Apache-2.0
"""Statuses for /diagnostics, in the form that rqt and aggregators read."""

from __future__ import annotations

import math
from collections.abc import Mapping

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

WARN, FAULT = DiagnosticStatus.WARN, DiagnosticStatus.ERROR
Problem = tuple[bytes, str]  # WARN or FAULT, and what is wrong


def make_array(stamp: Time, statuses: list[DiagnosticStatus]) -> DiagnosticArray:
    """Put all statuses of the node into one message."""
    array = DiagnosticArray(status=statuses)
    array.header.stamp = stamp
    return array


def make_status(name: str, problems: list[Problem], values: Mapping[str, object]) -> DiagnosticStatus:
    """Make one status: worst level, all problems as text, and the values."""
    level = max((level for level, _ in problems), default=DiagnosticStatus.OK)
    message = "; ".join(text for _, text in problems) or "ok"
    pairs = [KeyValue(key=key, value=_format(value)) for key, value in values.items()]
    return DiagnosticStatus(name=name, level=level, message=message, hardware_id="edgellm_ros", values=pairs)


def since(age_s: float) -> str:
    """Return how long something has been missing, as a part of a problem's text."""
    return f"for {age_s:.1f} s" if math.isfinite(age_s) else "so far"


def _format(value: object) -> str:
    """Format a value: counts and bytes whole, other numbers to the microsecond.

    Simulated clocks and memory sizes need more than the six digits of `:g`.
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return str(int(value)) if value.is_integer() else f"{value:.6f}".rstrip("0").rstrip(".")
