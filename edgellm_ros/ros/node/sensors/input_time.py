# SPDX-License-Identifier: Apache-2.0
"""The time of an input (ns of the node's clock), and checks of its age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgellm_ros.ros.messaging import to_nanoseconds


class StaleInputError(ValueError):
    """Camera or odometry input is missing, too old, or stamped in the future."""


@dataclass(frozen=True, eq=False)
class Frame:
    """A camera message and the time from which its age is counted."""

    message: Any  # sensor_msgs Image or CompressedImage
    arrival: int | None = None  # None for images of a goal, which have no age without a stamp

    @property
    def time(self) -> int | None:
        """The stamp; without a stamp the arrival."""
        return to_nanoseconds(self.message.header.stamp) or self.arrival


def check_age(name: str, time: int, now: int, limit_s: float) -> None:
    """Raise StaleInputError if `time` is more than `limit_s` ago."""
    age_s = (now - time) * 1e-9
    if age_s > limit_s:
        raise StaleInputError(f"{name} is {age_s:.2f} s old, limit {limit_s:g} s (parameter max_input_age)")


def check_not_future(name: str, time: int, now: int, tolerance_s: float) -> None:
    """Raise StaleInputError if `time` is more than `tolerance_s` ahead of `now`."""
    ahead_s = (time - now) * 1e-9
    if ahead_s <= tolerance_s:
        return
    if now == 0:
        raise StaleInputError(
            f"{name} has no age, because the node's clock is at 0: with use_sim_time, something must publish "
            "/clock"
        )
    raise StaleInputError(
        f"{name} is stamped {ahead_s:.2f} s in the future, limit {tolerance_s:g} s "
        "(parameter future_stamp_tolerance)"
    )
