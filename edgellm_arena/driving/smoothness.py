# SPDX-License-Identifier: Apache-2.0
"""How smooth a drive is where one plan takes over from another, and within plans.

All values are of the executed motion: in each step of DT the acceleration and the yaw rate are constant, and
they jump at the borders between steps. Such a jump divided by DT is the jerk (m/s^3) or the yaw acceleration
(rad/s^2) at the border.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm_arena.world.unicycle import DT, advance, wrap


@dataclass(frozen=True)
class Jumps:
    """Absolute jerks [N] and yaw accelerations [N] at N borders between steps."""

    jerk: NDArray[np.float64]  # m/s^3
    yaw_acceleration: NDArray[np.float64]  # rad/s^2


def jumps(track: NDArray, drivers: Sequence[int | None]) -> tuple[Jumps, Jumps]:
    """Return the jumps at changes of the driver, and those within plans.

    track: states [T+1, 4]; drivers: of each step the number of its plan, or None for braking. A change from a
    plan to braking counts, as does one from braking to a plan. The start of the first plan does not. Borders
    within braking, and those at which the robot stands before and after, are in neither of the two.
    """
    accelerations, yaw_rates = motion(track)
    numbers = np.array([-1 if driver is None else driver for driver in drivers])
    if len(numbers) != len(accelerations):
        raise ValueError(f"{len(numbers)} drivers for {len(accelerations)} steps")
    jerk, yaw = (np.abs(np.diff(values)) / DT for values in (accelerations, yaw_rates))
    before, after = numbers[:-1], numbers[1:]
    started = np.maximum.accumulate(before) >= 0 if len(before) else np.zeros(0, bool)
    moves = track[:, 3] > 0
    moving = moves[:-2] | moves[1:-1] | moves[2:]
    changed, inside = started & moving & (before != after), moving & (before == after) & (after >= 0)
    return Jumps(jerk[changed], yaw[changed]), Jumps(jerk[inside], yaw[inside])


def excess_jumps(track: NDArray, continuations: Mapping[int, tuple[float, float]]) -> Jumps:
    """Return by how much jumps at changes differ from those old plans had led to.

    track: states [T+1, 4]; continuations: for the steps in which a plan took over, the action (m/s^2, 1/m) of
    the plan before it. 0 means that the new plan goes on as the old one. A robot that stands has no value.
    """
    excess = []
    for step in sorted(step for step in continuations if step < len(track) - 1):
        continued = np.stack([track[step], advance(track[step], *continuations[step])])
        if not (track[step : step + 2, 3].any() or continued[1, 3]):  # the robot stands
            continue
        (acceleration,), (yaw_rate,) = motion(continued)
        (executed,), (executed_yaw_rate,) = motion(track[step : step + 2])
        excess.append((abs(executed - acceleration) / DT, abs(executed_yaw_rate - yaw_rate) / DT))
    jerk, yaw = np.array(excess).reshape(-1, 2).T
    return Jumps(jerk, yaw)


def named_jumps(
    track: NDArray, drivers: Sequence[int | None], continuations: Mapping[int, tuple[float, float]]
) -> dict[str, list[float]]:
    """Return all jumps of a drive by name, in m/s^3 and rad/s^2.

    track: states [T+1, 4]; drivers, continuations: as in `jumps` and `excess_jumps`.
    """
    at_changes, within_plans = jumps(track, drivers)
    excess = excess_jumps(track, continuations)
    return {
        "jerk_at_changes": at_changes.jerk.tolist(),
        "excess_jerk_at_changes": excess.jerk.tolist(),
        "jerk_within_plans": within_plans.jerk.tolist(),
        "yaw_acceleration_at_changes": at_changes.yaw_acceleration.tolist(),
        "excess_yaw_acceleration_at_changes": excess.yaw_acceleration.tolist(),
        "yaw_acceleration_within_plans": within_plans.yaw_acceleration.tolist(),
    }


def motion(track: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return accelerations [T] and yaw rates [T] of the steps between states [T+1, 4]."""
    return np.diff(track[:, 3]) / DT, wrap(np.diff(track[:, 2])) / DT
