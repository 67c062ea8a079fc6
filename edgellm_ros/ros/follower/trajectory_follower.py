# SPDX-License-Identifier: Apache-2.0
"""Follows the newest action chunk within the robot's limits; stops without one.

    frame   A               B
    chunk       [A.........]    [B.........
    driven  ....A1 A2 A3 A4 A5 A6~~B2 B3 B4        ~~: from A to B over the blend time

Needs no ROS and reads no clock: times are nanoseconds of the caller's clock.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.ros.chunk_checks import ORDER_REASONS, TABLE_REASONS, ChunkOrder, RefusedChunkError
from edgellm_ros.ros.follower.course import Chunk, Course, Limits
from edgellm_ros.ros.follower.speed_history import SpeedHistory

JUMP_S = 0.5  # a larger difference between clock and elapsed time is a jump of the clock
LONGEST_STEP = 2.0  # periods: a command that is late makes no larger change of the speed
MAX_POSES = 1000
REASONS = TABLE_REASONS + ORDER_REASONS  # for which a chunk is refused: names in `counts`


class Mode(str, Enum):
    """What the follower does."""

    WAITING = "waiting"  # stands still, no chunk to follow
    FOLLOWING = "following"
    BRAKING = "braking"  # no chunk to follow, or stopped, and still in motion
    STOPPED = "stopped"  # stands still until `resume`


@dataclass(frozen=True)
class Settings:
    """Limits and times of the follower, in seconds."""

    limits: Limits
    period: float  # from one command to the next
    blend_time: float  # from the old chunk to a new one
    max_chunk_age: float  # a chunk is followed until its frame is this old
    future_tolerance: float  # a frame may be this far ahead of the clock


@dataclass(frozen=True)
class Motion:
    """A command: speed in m/s and curvature in 1/m."""

    speed: float = 0.0
    curvature: float = 0.0

    @property
    def yaw_rate(self) -> float:
        """The yaw rate in rad/s."""
        return self.speed * self.curvature


@dataclass(frozen=True)
class _Blend:
    """The difference to a new course when the course began, which fades out."""

    start: int  # ns
    speed: float
    curvature: float

    def weight(self, time: int, duration: float) -> float:
        """Return the difference's share at `time`: 1 at the start, 0 after `duration` (s)."""
        if duration <= 0:
            return 0.0
        part = min(max((time - self.start) * 1e-9 / duration, 0.0), 1.0)
        return 1.0 - part * part * (3.0 - 2.0 * part)


class TrajectoryFollower:
    """Turns chunks into commands. `counts` has the chunks by what became of them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.motion = Motion()  # the last command
        self.stopped = False
        self.counts: Counter[str] = Counter()
        self._measured, self._commanded = SpeedHistory(), SpeedHistory()
        self._before = self.motion  # the command before it: the motion at the last step
        self._last: int | None = None  # ns, time of the last step
        self._begin(0)

    @property
    def mode(self) -> Mode:
        """What the follower does since the last step."""
        if self._course is not None and not self.stopped:
            return Mode.FOLLOWING
        if self.motion.speed > 0:
            return Mode.BRAKING
        return Mode.STOPPED if self.stopped else Mode.WAITING

    @property
    def stamp(self) -> int | None:
        """The stamp in ns of the chunk that is followed."""
        return None if self._course is None else self._course.stamp

    # Inputs

    def start(self, now: int) -> None:
        """Begin at `now` (ns) at the measured speed; follow only chunks of later frames."""
        measured = self._measured.at(now) or 0.0
        self.motion = self._before = Motion(min(max(measured, 0.0), self.settings.limits.speed))
        self._commanded.clear()
        self._begin(now)
        self._last = None

    def stop(self) -> None:
        """Brake to a standstill and stay there until `resume`."""
        self.stopped = True
        self.drop()

    def drop(self) -> None:
        """Brake until the next chunk."""
        self._course = None

    def resume(self, now: int) -> None:
        """End the stop; only chunks of frames from `now` (ns) on are followed."""
        if self.stopped:
            self.stopped = False
            self._begin(now)

    def observe_speed(self, stamp: int, speed: float) -> None:
        """Store a measured speed. The robot had it at `stamp` (ns)."""
        self._measured.add(stamp, speed)

    def add(self, chunk: Chunk, now: int) -> None:
        """Follow the chunk from the row that applies at `now` (ns).

        Raises RefusedChunkError for a chunk that is not followed, and counts it by its reason.
        """
        try:
            self._check(chunk, now)
        except RefusedChunkError as error:
            self.counts[error.reason] += 1
            raise
        self.counts["accepted"] += 1
        course = Course.of(chunk, self._speed_at(chunk.stamp), self.settings.limits)
        bend = self.motion.curvature - course.curvature_at(now) if self.motion.speed > 0 else 0.0
        self._course = course
        self._blend = _Blend(now, self.motion.speed - course.speed_at(now), bend)

    def _check(self, chunk: Chunk, now: int) -> None:
        if self._last is not None and now < self._last - JUMP_S * 1e9:
            self._forget(now)
        if self.stopped:
            raise RefusedChunkError("stopped", "stopped until ~/resume")
        self._order.accept(
            chunk.stamp,
            chunk.request_id,
            end=chunk.end,
            now=now,
            max_age=self.settings.max_chunk_age,
            future_tolerance=self.settings.future_tolerance,
        )

    # Outputs

    def step(self, now: int, elapsed: float) -> Motion:
        """Return the command for the period that begins at `now` (ns).

        elapsed: seconds since the last step, by a clock that does not jump.
        """
        if self._last is not None and abs((now - self._last) * 1e-9 - elapsed) > JUMP_S:
            self._forget(now)
        self._last = now
        if self._course is not None and not self._is_live(now):
            self.counts["watchdog_stops"] += self.motion.speed > 0
            self.drop()
        period = self.settings.period
        elapsed = min(max(elapsed, 0.0), LONGEST_STEP * period)
        self._commanded.add(now, self.motion.speed)
        self._before = self.motion
        self.motion = self._next(self._before, now, period, elapsed)
        return self.motion

    def predict(self, now: int) -> NDArray[np.float64]:
        """Return the states [N, 4] up to the standstill if no further chunk arrives.

        x, y (m), heading (rad) and speed (m/s) in the base frame at the last step's time `now` (ns),
        `prediction_dt` apart.
        """
        dt, motion = self.prediction_dt, self._before
        x = y = heading = 0.0
        states = [(x, y, heading, motion.speed)]
        for index in range(MAX_POSES - 1):
            time = now + round(index * dt * 1e9)
            if motion.speed == 0 and not self._is_live(time):
                break
            after = self._next(motion, time, dt, dt)
            way = 0.5 * (motion.speed + after.speed) * dt
            turn = after.curvature * way
            chord, middle = way * float(np.sinc(turn / (2 * np.pi))), heading + turn / 2
            x, y, heading = x + chord * math.cos(middle), y + chord * math.sin(middle), heading + turn
            motion = after
            states.append((x, y, heading, motion.speed))
        return np.array(states)

    @property
    def prediction_dt(self) -> float:
        """Seconds from one state of a prediction to the next."""
        return self.settings.period if self._course is None else max(self._course.dt, self.settings.period)

    def _next(self, motion: Motion, time: int, period: float, elapsed: float) -> Motion:
        """Return the command after `motion` for one period.

        Aims at the course's speed at the end of the period and at its curvature in the middle.
        """
        course, blend, limits = self._course, self._blend, self.settings.limits
        speed, curvature = 0.0, motion.curvature
        if course is not None and self._is_live(time):
            end = time + round(period * 1e9)
            weight = blend.weight(end, self.settings.blend_time)
            speed = course.speed_at(end) + weight * blend.speed
            curvature = course.curvature_at((time + end) // 2) + weight * blend.curvature
        curvature = min(max(curvature, -limits.curvature), limits.curvature)
        speed = min(max(speed, 0.0), limits.speed)
        if curvature:
            speed = min(speed, math.sqrt(limits.lateral_acceleration / abs(curvature)))
        lowest = max(motion.speed - limits.deceleration * elapsed, 0.0)
        speed = min(max(speed, lowest), motion.speed + limits.acceleration * elapsed)
        if speed * speed * abs(curvature) > limits.lateral_acceleration:  # braking cannot come in time
            curvature = math.copysign(limits.lateral_acceleration / (speed * speed), curvature)
        return Motion(speed, curvature if speed > 0 else 0.0)

    def _is_live(self, time: int) -> bool:
        course = self._course
        if course is None:
            return False
        age = (time - course.stamp) * 1e-9
        early = age < -self.settings.future_tolerance
        return not early and time < course.end and age <= self.settings.max_chunk_age

    def _speed_at(self, stamp: int) -> float:
        """Return the speed at `stamp`: measured, else commanded, else the last command's."""
        for history in (self._measured, self._commanded):
            speed = history.at(stamp)
            if speed is not None:
                return speed
        return self.motion.speed

    def _begin(self, now: int) -> None:
        self._order = ChunkOrder(now)
        self._course: Course | None = None
        self._blend = _Blend(now, 0.0, 0.0)

    def _forget(self, now: int) -> None:
        """Drop everything that has a time, after a jump of the clock."""
        self.counts["clock_jumps"] += 1
        self._measured.clear()
        self._commanded.clear()
        self._begin(now)
        self._last = None
