# SPDX-License-Identifier: Apache-2.0
"""A robot's past motion by odometry, and whether poses and twist agree; no ROS.

A model reads from the past poses how fast the robot drives, and a controller takes the speed from the twist.
If the two differ, actions that shall stop the robot leave it at the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SAME_M_S = 0.01  # below this difference, that of rounding and of the sampling, the poses are used
REFUSED_SHARE = 0.5  # of the larger distance: beyond it one of the two is not the robot's motion
REFUSED_TOLERANCES = 2.0  # below this many tolerances nothing is refused: a slow robot differs by noise
# columns of samples [N, 6]
TIME, X, Y, HEADING, AHEAD, SIDEWAYS = range(6)


@dataclass(frozen=True)
class Agreement:
    """What the robot drove by its poses and by its twist, in the time of a history.

    Distances are metres ahead and to the left in the base frame, signed: backwards is negative.
    """

    poses: tuple[float, float]
    twist: tuple[float, float]
    seconds: float  # of the history; the samples may cover less of it

    @property
    def difference(self) -> float:
        """Difference of the mean velocities in m/s."""
        return math.dist(self.poses, self.twist) / self.seconds

    def refused(self, tolerance: float) -> bool:
        """Return whether one of the two cannot be the robot's motion.

        `tolerance` in m/s. A difference to the side never is: a base frame beside the axle swings when the
        robot turns.
        """
        ahead, by_twist = self.poses[0], self.twist[0]
        apart = abs(ahead - by_twist)
        largest = max(abs(ahead), abs(by_twist))
        return apart > REFUSED_TOLERANCES * tolerance * self.seconds and apart > REFUSED_SHARE * largest

    def problem(self, tolerance: float) -> str:
        """Return how the two differ; empty within `tolerance` (m/s)."""
        if self.difference <= tolerance:
            return ""
        poses, twist = (self._speed(distances) for distances in (self.poses, self.twist))
        return (
            f"poses and twist of the odometry differ by {self.difference:.2f} m/s, limit {tolerance:g} m/s "
            f"(parameter odom_tolerance): in the last {self.seconds:g} s the mean speed is {poses} by "
            f"pose.pose and {twist} by twist.twist.linear"
        )

    def _speed(self, distances: tuple[float, float]) -> str:
        ahead, sideways = (distance / self.seconds for distance in distances)
        return f"{ahead:.2f} m/s" + (
            f" ahead, {sideways:.2f} m/s to the left" if abs(sideways) > 0.01 else ""
        )


@dataclass(frozen=True, eq=False)
class PastMotion:
    """Past poses and speed of a robot at one time."""

    history: np.ndarray  # [num_points, 3] x, y, heading in the base frame at that time, oldest first
    speed: float  # m/s by the twist, at least 0
    agreement: Agreement


def past_motion(samples: np.ndarray, stamp: float, num_points: int, dt: float) -> PastMotion:
    """Return past poses up to `stamp` (s), and the speed then, of samples [N, 6].

    `num_points` poses are `dt` seconds apart. Values between samples are interpolated. Before the first and
    after the last sample the robot drives straight on at that sample's velocity. The positions come from the
    poses; if these differ from the twist, from the integral of the twist along the headings, so that history
    and speed always agree.
    """
    at = stamp + dt * np.arange(1 - num_points, 1)
    agreement = compare(samples, stamp, (num_points - 1) * dt)
    track = _resampled(_driven_on(samples, float(at[0]), stamp), at)
    if agreement.difference > SAME_M_S:
        track[:, X : Y + 1] = _integrated(track)
    track = track[np.searchsorted(track[:, TIME], at)]
    offset, heading = track[:, X : Y + 1] - track[-1, X : Y + 1], track[-1, HEADING]
    cos, sin = math.cos(heading), math.sin(heading)
    history = np.column_stack(
        [
            cos * offset[:, 0] + sin * offset[:, 1],
            -sin * offset[:, 0] + cos * offset[:, 1],
            track[:, HEADING] - heading,
        ]
    )
    return PastMotion(history, max(0.0, float(track[-1, AHEAD])), agreement)


def compare(samples: np.ndarray, stamp: float, seconds: float) -> Agreement:
    """Compare poses and twist of samples [N, 6] in the `seconds` up to `stamp` (s)."""
    first, last = samples[0, TIME], samples[-1, TIME]
    ends = np.clip([stamp - seconds, stamp], first, last)
    track = _resampled(samples, ends)
    track = track[(track[:, TIME] >= ends[0]) & (track[:, TIME] <= ends[1])]
    by_poses = _in_base(np.diff(track[:, X : Y + 1], axis=0), track[:, HEADING]).sum(axis=0)
    by_twist = _steps(track).sum(axis=0)
    return Agreement(
        (float(by_poses[0]), float(by_poses[1])), (float(by_twist[0]), float(by_twist[1])), seconds
    )


def _driven_on(samples: np.ndarray, start: float, end: float) -> np.ndarray:
    """Return samples that reach from `start` to `end` (s).

    Outside of them the robot drives straight on.
    """
    parts = [samples]
    for time, known, before in ((start, samples[0], True), (end, samples[-1], False)):
        elapsed = time - known[TIME]
        if (elapsed < 0) != before or elapsed == 0:
            continue
        added = known.copy()
        added[TIME] = time
        added[X : Y + 1] += elapsed * _turned(known[None, AHEAD:], known[None, HEADING])[0]
        parts.insert(0 if before else len(parts), added[None])
    return np.concatenate(parts)


def _resampled(samples: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the samples and those interpolated at the times `at` (s), by time.

    The headings have no jumps from pi to -pi.
    """
    times = np.sort(np.concatenate([samples[:, TIME], at]))
    times = times[np.concatenate([[True], np.diff(times) > 0])]
    columns = [samples[:, column] for column in range(1, samples.shape[1])]
    columns[HEADING - 1] = np.unwrap(samples[:, HEADING])
    return np.column_stack([times, *(np.interp(times, samples[:, TIME], column) for column in columns)])


def _steps(track: np.ndarray) -> np.ndarray:
    """Return the steps [N - 1, 2] ahead and to the left, by the twist."""
    elapsed = np.diff(track[:, TIME])[:, None]
    return elapsed * (track[:-1, AHEAD:] + track[1:, AHEAD:]) / 2


def _integrated(track: np.ndarray) -> np.ndarray:
    """Return positions [N, 2] by twist and headings; the first is (0, 0)."""
    turn, middle = _turns(track[:, HEADING])
    chords = _steps(track) * np.sinc(turn / (2 * math.pi))[:, None]
    return np.concatenate([np.zeros((1, 2)), np.cumsum(_turned(chords, middle), axis=0)])


def _in_base(steps: np.ndarray, headings: np.ndarray) -> np.ndarray:
    """Return steps [N - 1, 2] between poses in the base frame, as lengths of arcs.

    `headings` [N] are those of the poses.
    """
    turn, middle = _turns(headings)
    return _turned(steps, -middle) / np.sinc(turn / (2 * math.pi))[:, None]


def _turns(headings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return turns from heading to heading, and headings half way, both [N - 1]."""
    turn = np.diff(headings)
    return turn, headings[:-1] + turn / 2


def _turned(vectors: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Turn each of vectors [N, 2] by its angle [N]."""
    cos, sin = np.cos(angles), np.sin(angles)
    x, y = vectors[:, 0], vectors[:, 1]
    return np.column_stack([cos * x - sin * y, sin * x + cos * y])
