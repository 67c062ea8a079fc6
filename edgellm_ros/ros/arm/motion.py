# SPDX-License-Identifier: Apache-2.0
"""Moves joints along targets, within limits from position to jerk.

    target    .......*-----*--.           the chunk's rows, a straight line from each to the next
    profile   ....------------ '--*__     follows as fast as the limits allow, and rests at the end
    motion    ....------------. '--*__    the profile's average over the last w seconds

Time is divided into periods, in each of which a profile has constant acceleration. Before every period, each
joint chooses its next speed from an interval that leaves it room to brake before the end of its range.
Braking at the limit is always within the interval, so the limits hold whatever the targets are.

The average of a profile over w seconds stays within the same limits, and its jerk is
(a(t) - a(t - w)) / w, at most 2 a_max / w. In each period it has constant jerk, so a cubic spline through its
positions and speeds, as ros2_control's controllers compute it, is exactly this motion. It lags w / 2 behind
its profile, which follows the targets as much ahead. Needs no ROS and reads no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """Limits of J joints, in rad or m and seconds."""

    lowest: Array  # [J]
    highest: Array
    speed: Array
    acceleration: Array
    jerk: Array

    def windows(self, period: float) -> NDArray[np.int64]:
        """Return over how many periods (s) each joint's profile is averaged [J]."""
        return averaged_periods(self.acceleration, self.jerk, period)


def averaged_periods(acceleration: Array, jerk: Array, period: float) -> NDArray[np.int64]:
    """Return the fewest periods, at least one, whose average keeps to a jerk.

    acceleration, jerk: limits [J] in rad or m and seconds. period: s.
    """
    return np.ceil(2 * acceleration / (jerk * period) - 1e-9).astype(np.int64)


@dataclass(frozen=True)
class Profile:
    """Positions and speeds at the beginning of each period, before they are averaged."""

    positions: Array  # [H + N, J] rad or m
    speeds: Array  # [H + N, J]


@dataclass(frozen=True)
class Motion:
    """Positions and speeds at the times `start + k * period`; rests at its end."""

    start: float  # s
    period: float  # s
    positions: Array  # [N, J] rad or m
    speeds: Array  # [N, J], the last row 0
    profile: Profile  # row H is at `start`, H the longest of the windows

    @property
    def end(self) -> float:
        """The time in s from which the joints rest."""
        return self.start + (len(self.positions) - 1) * self.period

    def index_from(self, time: float) -> int:
        """Return the first row at or after `time` (s), at most the last one."""
        row = math.ceil((time - self.start) / self.period - 1e-6)
        return min(max(row, 0), len(self.positions) - 1)

    def at(self, time: float) -> tuple[Array, Array]:
        """Return positions and speeds [J] at `time` (s): before the start the first row."""
        row = min(max((time - self.start) / self.period, 0.0), float(len(self.positions) - 1))
        index = min(int(row), len(self.positions) - 2)
        part = row - index
        begin, way = self.positions[index], self.positions[index + 1] - self.positions[index]
        before, after = self.period * self.speeds[index], self.period * self.speeds[index + 1]
        square, cube = 3 * way - 2 * before - after, before + after - 2 * way
        position = begin + part * (before + part * (square + part * cube))
        return position, (before + part * (2 * square + 3 * part * cube)) / self.period


def rest(position: Array, time: float, period: float, limits: Limits) -> Motion:
    """Return joints that stand at `position` [J] from `time` (s) on."""
    windows = limits.windows(period)
    positions = np.tile(position, (int(windows.max()) + 2, 1))
    return _averaged(Profile(positions, np.zeros_like(positions)), time, period, windows)


def follow(
    targets: Array, dt: float, stamp: float, *, begin: Motion, time: float, end: float, blend_time: float,
    limits: Limits,
) -> Motion:  # fmt: skip
    """Return the motion along `targets` [T, J] that begins on the motion `begin`.

    - Row k of the targets is reached dt * (k + 1) seconds after `stamp`.
    - The motion begins at the first row of `begin` from `time` on, and rests at `end`, or as soon after it as
      braking allows. Times in s.
    - What separates the targets from the first position fades out over `blend_time` seconds.
    """
    first, period = begin.index_from(time), begin.period
    windows = limits.windows(period)
    longest = int(windows.max())
    start = begin.start + first * period
    if first == len(begin.positions) - 1:  # it rests
        start = max(start, time)
    positions, speeds = _history(begin, first, longest)
    position, speed = positions[-1], speeds[-1]
    stops = np.ceil(np.abs(speed) / (limits.acceleration * period) - 1e-9)
    # Periods until each profile is to rest; it moves on only while it has to brake.
    moves = np.maximum(stops, math.floor((end - start) / period + 1e-6) - windows)
    rows = max(int(moves.max()), 1)
    times = start + period * np.arange(rows + 2)
    wanted = targets_at(targets, dt, stamp, times[:, None] + 0.5 * period * windows)
    wanted += _fading(times - start, blend_time)[:, None] * (position - wanted[0])
    for row in range(rows):
        left = np.maximum(moves - row - 1, 0) * period
        speed = _next_speed(position, speed, wanted[row : row + 3], left, period, limits)
        position = position + 0.5 * period * (speeds[-1] + speed)
        positions.append(position)
        speeds.append(speed)
    return _until_rest(positions, speeds, start, period, windows)


def targets_at(targets: Array, dt: float, stamp: float, times: Array) -> Array:
    """Return the targets [N, J] at `times` [N, J] or [N, 1] (s).

    Before the time of the first row they are the first row, after that of the last the last.
    """
    knots = stamp + dt * np.arange(1, len(targets) + 1)
    columns = np.broadcast_to(times, (len(times), targets.shape[1])).T
    return np.stack([np.interp(at, knots, column) for at, column in zip(columns, targets.T, strict=True)], -1)


def brake(begin: Motion, time: float, limits: Limits) -> Motion:
    """Return the motion that leaves `begin` at its first row from `time`, and stops."""
    first, period = begin.index_from(time), begin.period
    windows = limits.windows(period)
    positions, speeds = _history(begin, first, int(windows.max()))
    change = limits.acceleration * period
    while speeds[-1].any():
        speed = np.sign(speeds[-1]) * np.maximum(np.abs(speeds[-1]) - change, 0.0)
        positions.append(positions[-1] + 0.5 * period * (speeds[-1] + speed))
        speeds.append(speed)
    return _until_rest(positions, speeds, begin.start + first * period, period, windows)


def _history(motion: Motion, first: int, longest: int) -> tuple[list[Array], list[Array]]:
    """Return the rows of the profile up to the motion's row `first`.

    The averages from there on need these `longest` + 1 rows.
    """
    rows = slice(first, first + longest + 1)
    return list(motion.profile.positions[rows]), list(motion.profile.speeds[rows])


def _until_rest(
    positions: list[Array], speeds: list[Array], start: float, period: float, windows: NDArray[np.int64]
) -> Motion:
    """Return the motion of a profile that rests from its last row on."""
    longest = int(windows.max())
    profile = Profile(
        np.array(positions + [positions[-1]] * longest),
        np.array([*speeds[:-1], *[np.zeros_like(speeds[-1])] * (longest + 1)]),  # 0 but for rounding
    )
    return _averaged(profile, start, period, windows)


def _averaged(profile: Profile, start: float, period: float, windows: NDArray[np.int64]) -> Motion:
    """Return the average over the last `windows` [J] periods, until it rests.

    start: s, of the row `max(windows)` of the profile, with which the motion begins.
    """
    positions, speeds = profile.positions, profile.speeds
    ways = positions - positions[0]
    areas = np.zeros_like(ways)  # integrals of the ways, which are square functions of time in a period
    parts = 0.5 * (ways[:-1] + ways[1:]) + period / 12 * (speeds[:-1] - speeds[1:])
    np.cumsum(parts, 0, out=areas[1:])
    moved = np.where(speeds != 0, np.arange(len(speeds))[:, None] + 1, 0).max(0)
    rests = moved + windows  # the first row [J] whose average is over time at rest
    longest = int(windows.max())
    rows = np.arange(longest, max(int(rests.max()), longest + 1) + 1)[:, None]
    joints, before = np.arange(len(windows)), rows - windows
    averages = positions[0] + (areas[rows, joints] - areas[before, joints]) / windows
    averages = np.where(rows < rests, averages, positions[-1])  # but for rounding
    rates = (positions[rows, joints] - positions[before, joints]) / (period * windows)
    return Motion(
        start, period, averages, rates, Profile(positions[: rows[-1, 0] + 1], speeds[: rows[-1, 0] + 1])
    )


def _next_speed(
    position: Array, speed: Array, wanted: Array, left: Array, period: float, limits: Limits
) -> Array:
    """Return the speed [J] at the end of a period.

    `wanted` [3, J]: where to be at its beginning, at its end, and a period later. `left` [J]: seconds from
    its end to the rest.
    """
    acceleration = limits.acceleration
    rate = (wanted[2] - wanted[0]) / (2 * period)
    behind = wanted[1] - position - 0.5 * period * (speed + rate)
    best = rate + np.sign(behind) * _speed_that_stops(np.abs(behind), acceleration, period)
    cap = np.minimum(limits.speed, acceleration * left)
    halfway = position + 0.5 * period * speed
    below = _speed_that_stops(limits.highest - halfway, acceleration, period)
    above = _speed_that_stops(halfway - limits.lowest, acceleration, period)
    change = acceleration * period
    low = np.maximum(speed - change, -np.minimum(cap, above))
    high = np.minimum(speed + change, np.minimum(cap, below))
    return np.minimum(np.maximum(best, low), high)


def _speed_that_stops(way: Array, acceleration: Array, period: float) -> Array:
    """Return the highest speed [J] at the end of a period with which a way suffices.

    `way` [J]: from where the joint would be if it had no speed then. From the speed u * acceleration * period
    the joint brakes in steps of acceleration * period to 0, which takes a way that is linear in u between
    whole numbers.
    """
    scaled = np.maximum(way, 0.0) / (acceleration * period * period)
    whole = np.floor((np.sqrt(1.0 + 8.0 * scaled) - 1.0) / 2.0)
    return (scaled + 0.5 * whole * (whole + 1.0)) / (whole + 1.0) * acceleration * period


def _fading(elapsed: Array, duration: float) -> Array:
    """Return the share of a difference after `elapsed` seconds: 1 at first, then 0."""
    if duration <= 0:
        return np.zeros_like(elapsed)
    part = np.clip(elapsed / duration, 0.0, 1.0)
    return 1.0 - part * part * (3.0 - 2.0 * part)
