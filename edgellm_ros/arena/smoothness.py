# SPDX-License-Identifier: Apache-2.0
"""How smooth a drive is where one plan takes over from another, and within plans.

All values are of the executed motion: in each step of DT the acceleration and the yaw rate are constant, and
they jump at the borders between steps. Such a jump divided by DT is the jerk (m/s^3) or the yaw acceleration
(rad/s^2) at the border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.arena.unicycle import DT, wrap


@dataclass(frozen=True)
class Jumps:
    """Absolute jerks [N] and yaw accelerations [N] at N borders between steps."""

    jerk: NDArray[np.float64]  # m/s^3
    yaw_acceleration: NDArray[np.float64]  # rad/s^2


def jumps(track: NDArray, drivers: Sequence[int | None]) -> tuple[Jumps, Jumps]:
    """Return the jumps at changes of the driver, and those within plans.

    track: states [T+1, 4]; drivers: of each step the number of its plan, or None for braking. A change from a
    plan to braking counts, as does one from braking to a plan. The start of the first plan does not, and
    borders within braking are in neither of the two.
    """
    accelerations = np.diff(track[:, 3]) / DT
    yaw_rates = wrap(np.diff(track[:, 2])) / DT
    numbers = np.array([-1 if driver is None else driver for driver in drivers])
    if len(numbers) != len(accelerations):
        raise ValueError(f"{len(numbers)} drivers for {len(accelerations)} steps")
    jerk, yaw = (np.abs(np.diff(values)) / DT for values in (accelerations, yaw_rates))
    before, after = numbers[:-1], numbers[1:]
    started = np.maximum.accumulate(before) >= 0 if len(before) else np.zeros(0, bool)
    changed, inside = started & (before != after), (before == after) & (after >= 0)
    return Jumps(jerk[changed], yaw[changed]), Jumps(jerk[inside], yaw[inside])
