# SPDX-License-Identifier: Apache-2.0
"""Moves joints along targets within limits of position, speed and acceleration.

    target    .......*-----*--.           the chunk's rows, a straight line from each to the next
    position  ....------------ '--*__     follows as fast as the limits allow, and rests at the end

Time is divided into periods, in each of which the acceleration is constant. Before every period, each joint
chooses its next speed from an interval that leaves it room to brake before the end of its range. Braking at
the limit is always within the interval, so the limits hold whatever the targets are. A cubic spline through
positions and speeds, as ros2_control's controllers compute it, is then exactly this motion.

The limit is one of acceleration and not of jerk: the time and the way to stop follow from it in closed form,
so that an arm is known to stand in time and within its range. Needs no ROS and reads no clock.
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


@dataclass(frozen=True)
class Motion:
    """Positions and speeds at the times `start + k * period`; rests at its end."""

    start: float  # s
    period: float  # s
    positions: Array  # [N, J] rad or m
    speeds: Array  # [N, J], the last row 0

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
        before, after = self.speeds[index], self.speeds[index + 1]
        change = part * (after - before)
        return self.positions[index] + self.period * part * (before + change / 2), before + change


def rest(position: Array, time: float, period: float) -> Motion:
    """Return joints that stand at `position` [J] from `time` (s) on."""
    positions = np.stack([position, position])
    return Motion(time, period, positions, np.zeros_like(positions))


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
    start = begin.start + first * period
    if first == len(begin.positions) - 1:  # it rests
        start = max(start, time)
    position, speed = begin.positions[first], begin.speeds[first]
    stops = math.ceil(float(np.max(np.abs(speed) / (limits.acceleration * period))) - 1e-9)
    rows = max(math.floor((end - start) / period + 1e-6), stops, 1)
    times = start + period * np.arange(rows + 2)
    wanted = targets_at(targets, dt, stamp, times)
    wanted += _fading(times - start, blend_time)[:, None] * (position - wanted[0])
    positions, speeds = [position], [speed]
    for row in range(rows):
        left = (rows - row - 1) * period
        speed = _next_speed(position, speed, wanted[row : row + 3], left, period, limits)
        position = position + 0.5 * period * (speeds[-1] + speed)
        positions.append(position)
        speeds.append(speed)
    speeds[-1] = np.zeros_like(speed)  # but for rounding
    return Motion(start, period, np.array(positions), np.array(speeds))


def targets_at(targets: Array, dt: float, stamp: float, times: Array) -> Array:
    """Return the targets [N, J] at `times` [N] (s).

    Before the time of the first row they are the first row, after that of the last the last.
    """
    knots = stamp + dt * np.arange(1, len(targets) + 1)
    return np.stack([np.interp(times, knots, column) for column in targets.T], -1)


def brake(begin: Motion, time: float, limits: Limits) -> Motion:
    """Return the motion that leaves `begin` at its first row from `time`, and stops."""
    first = begin.index_from(time)
    change = limits.acceleration * begin.period
    rows = max(math.ceil(float(np.max(np.abs(begin.speeds[first]) / change)) - 1e-9), 1)
    speed = begin.speeds[first]
    left = np.maximum(np.abs(speed) - np.arange(rows + 1)[:, None] * change, 0.0)
    left[-1] = 0.0
    speeds = np.sign(speed) * left
    steps = 0.5 * begin.period * (speeds[:-1] + speeds[1:])
    positions = begin.positions[first] + np.concatenate([np.zeros((1, len(speed))), np.cumsum(steps, 0)])
    return Motion(begin.start + first * begin.period, begin.period, positions, speeds)


def _next_speed(
    position: Array, speed: Array, wanted: Array, left: float, period: float, limits: Limits
) -> Array:
    """Return the speed [J] at the end of a period.

    `wanted` [3, J]: where to be at its beginning, at its end, and a period later. `left`: seconds from its
    end to the rest.
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
