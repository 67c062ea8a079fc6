# SPDX-License-Identifier: Apache-2.0
"""Decides which chunks an arm follows, and when it stops.

Needs no ROS and reads no clock. `now` is in seconds of a clock that does not jump, `wall` in nanoseconds of
the clock of the stamps. After `add`, `step` and `stop`, `motion` is what the joints are to do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.ros.arm.chunk import Chunk
from edgellm_ros.ros.arm.contract import FORWARD, Contract
from edgellm_ros.ros.arm.motion import Limits, Motion, brake, follow, rest, targets_at
from edgellm_ros.ros.arm.temporal_ensemble import TemporalEnsemble
from edgellm_ros.ros.chunk_checks import ORDER_REASONS, TABLE_REASONS, ChunkOrder, RefusedChunkError
from edgellm_ros.ros.follower.trajectory_follower import JUMP_S, LONGEST_STEP, Mode

MOST_PERIODS = 1000  # of a motion; one takes 31 ms to compute for 6 joints, and a stop waits for it
REASONS = (*TABLE_REASONS, *ORDER_REASONS, "stale_state", "in_motion", "outside_limits", "too_far")


@dataclass(frozen=True)
class Settings:
    """Times of the follower in seconds, and whether the arm is only shown its motion."""

    blend_time: float  # from the old chunk to a new one
    max_chunk_age: float  # a chunk is followed until its frame is this old
    max_state_age: float  # of joint states; older ones end the motion
    future_tolerance: float  # a frame may be this far ahead of the clock
    dry_run: bool  # nothing moves: each chunk begins where the arm stands
    ensemble_coeff: float | None = None  # of temporal ensembling; None = the newest chunk alone is followed
    follow_time: float = 0.0  # of each chunk, then of one whose frame has the arm at rest; 0 = until the next


class ArmFollower:
    """Turns chunks into motions. `counts` has those accepted, and the stops."""

    def __init__(self, contract: Contract, settings: Settings) -> None:
        """Hold no motion; ValueError for one of so many periods that a stop would wait."""
        rows = contract.rate * settings.max_chunk_age
        if rows > MOST_PERIODS:
            raise ValueError(
                f"max_chunk_age {settings.max_chunk_age:g} s at a rate of {contract.rate:g} Hz is "
                f"{rows:.0f} periods of motion, at most {MOST_PERIODS}: lower one of them"
            )
        self.contract, self.settings = contract, settings
        lowest, highest = contract.limits("position").T
        self._limits = Limits(lowest, highest, *map(contract.limits, ("speed", "acceleration", "jerk")))
        self._deviation = contract.limits("deviation")
        self._period = 1.0 / contract.rate
        self.counts: Counter[str] = Counter()
        self.clamped: Counter[str] = Counter()  # rows by joint
        self.stopped = False
        self.problem = ""  # why it stopped by itself
        self.measured = np.full(len(contract.joints), math.nan)  # rad or m [J]
        self._measured_at = np.full(len(contract.joints), -math.inf)  # s [J]
        self._ensemble = TemporalEnsemble()
        self.start(0)

    def start(self, wall: int) -> None:
        """Forget all motion; follow only chunks of later frames."""
        self.motion: Motion | None = None
        self._before: Motion | None = None  # what the joints do until `motion` starts
        self.follows = False  # a chunk, and not braking
        self._order = ChunkOrder(wall)
        self._last: tuple[float, int] | None = None

    # Inputs

    def stop(self, now: float, problem: str = "") -> None:
        """Brake, and stay at rest until `resume`."""
        self.stopped, self.problem = True, problem
        self.drop(now)

    def resume(self, wall: int) -> None:
        """End the stop; only chunks of frames from `wall` on are followed."""
        if self.stopped:
            self.stopped, self.problem = False, ""
            self._order = ChunkOrder(wall)

    def drop(self, now: float) -> None:
        """Brake until the next chunk."""
        self._catch_up(now)
        if self.motion is not None and self.is_moving(now) and self.follows:
            self._replace(brake(self.motion, now, self._limits), now)
        self.follows = False

    def observe(self, names: Sequence[str], positions: Sequence[float], time: float) -> bool:
        """Store measured positions (rad or m) by joint. Other joints are ignored.

        Returns whether all joints of the contract were seen by now. ValueError for a position that is not
        finite, or another number of positions than of names.
        """
        if len(names) != len(positions):
            raise ValueError(f"joint states have {len(names)} names and {len(positions)} positions")
        found = dict(zip(names, positions, strict=True))
        for index, name in enumerate(self.contract.ros_names):
            if name in found and not math.isfinite(found[name]):
                raise ValueError(f"joint states have a position of {found[name]} for {name}")
            if name in found and time >= self._measured_at[index]:
                self.measured[index], self._measured_at[index] = found[name], time
        return bool(np.isfinite(self.measured).all())

    def add(self, chunk: Chunk, now: float, wall: int) -> Motion:
        """Follow the chunk, from the present motion on.

        Raises RefusedChunkError for a chunk that is not followed.
        """
        self._catch_up(now)
        motion = self._follow(chunk, now, wall)
        self.counts["accepted"] += 1
        self._replace(motion, now)
        self.follows = True
        return motion

    def _replace(self, motion: Motion, now: float) -> None:
        if self.motion is None or self.motion.start <= now:
            self._before = self.motion
        self.motion = motion

    def _follow(self, chunk: Chunk, now: float, wall: int) -> Motion:
        if self.stopped:
            raise RefusedChunkError("stopped", "stopped until ~/resume")
        rows_s = len(chunk.targets) * chunk.dt
        one_by_one = self.settings.follow_time > 0 and not self.settings.dry_run
        self._order.accept(
            chunk.stamp,
            chunk.request_id,
            end=(wall if one_by_one else chunk.stamp) + round(rows_s * 1e9),
            now=wall,
            max_age=self.settings.max_chunk_age,
            future_tolerance=self.settings.future_tolerance,
        )
        if self.state_age(now) > self.settings.max_state_age:
            raise RefusedChunkError("stale_state", self._stale(now))
        begin = self._begin(now)
        stamp = now - (wall - chunk.stamp) * 1e-9
        if one_by_one:  # an arm that has stood since the frame is still where the first row begins
            self._check_at_rest(stamp)
            stamp = now
        first = begin.index_from(now)
        wanted = targets_at(chunk.targets, chunk.dt, stamp, np.array([[now]]))[0]
        self._check_near(wanted, begin.positions[first])
        targets = np.clip(chunk.targets, self._limits.lowest, self._limits.highest)
        outside = (np.abs(targets - chunk.targets) > 1e-6).sum(0)
        self.clamped.update(
            {name: int(rows) for name, rows in zip(self.contract.ros_names, outside, strict=True) if rows}
        )
        targets = self._mean(chunk, targets)
        return follow(
            targets,
            chunk.dt,
            stamp,
            begin=begin,
            time=now,
            end=stamp + min(rows_s, self.settings.follow_time or self.settings.max_chunk_age),
            blend_time=self.settings.blend_time,
            limits=self._limits,
        )

    def _check_at_rest(self, stamp: float) -> None:
        if self.motion is not None and stamp < self.motion.end - 1e-6:
            moved = self.motion.end - stamp
            raise RefusedChunkError("in_motion", f"the arm moves until {moved:.2f} s after the chunk's frame")

    def _mean(self, chunk: Chunk, targets: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what is followed [T, J]: the targets, or their mean with those before.

        The mean begins again with the first chunk after a stop, or after the chunks ran out.
        """
        coeff = self.settings.ensemble_coeff
        if coeff is None or not self.follows:
            self._ensemble.clear()
        return targets if coeff is None else self._ensemble.add(chunk.stamp, chunk.dt, targets, coeff)

    def _begin(self, now: float) -> Motion:
        """Return the motion that a new one continues: the present one, or standing still.

        An arm at rest begins where it was commanded to be, unless it is not there.
        """
        motion = self.motion
        if motion is not None and not self.settings.dry_run:
            if self.is_moving(now):
                return motion
            if (np.abs(self.measured - motion.positions[-1]) <= self._deviation).all():
                return rest(motion.positions[-1], now, self._period, self._limits)
        for index, name in enumerate(self.contract.ros_names):
            low, high = self._limits.lowest[index], self._limits.highest[index]
            if not low <= self.measured[index] <= high:
                raise RefusedChunkError(
                    "outside_limits",
                    f"joint {name} stands at {self.measured[index]:.3f}, its limits are {low:g} to {high:g}",
                )
        return rest(self.measured, now, self._period, self._limits)

    def _check_near(self, wanted: NDArray, position: NDArray) -> None:
        away = np.abs(wanted - position)
        if (away > self._deviation).any():
            index = int(np.argmax(away / self._deviation))
            raise RefusedChunkError(
                "too_far",
                f"joint {self.contract.ros_names[index]} is at {position[index]:.3f} and the chunk begins at "
                f"{wanted[index]:.3f}, at most {self._deviation[index]:g} apart",
            )

    # Outputs

    def step(self, now: float, wall: int) -> Motion | None:
        """Check clock and joint states, once per period; return `motion`."""
        self._check_clock(now, wall)
        motion = self.motion
        if motion is None or not self.is_moving(now):
            self.counts["run_out"] += self.follows
            self.follows = False
        elif self.state_age(now) > self.settings.max_state_age:
            if self.follows:
                self.counts["stale_stops"] += 1
                self.drop(now)
        elif not self.settings.dry_run and self.follows:
            # Each joint where it was commanded to be when it was measured.
            commanded = np.diag(np.array([motion.at(time)[0] for time in self._measured_at]))
            away = np.abs(self.measured - commanded)
            if (away > self._deviation).any():
                index = int(np.argmax(away / self._deviation))
                self.counts["deviations"] += 1
                self.stop(
                    now,
                    f"joint {self.contract.ros_names[index]} is {away[index]:.3f} off its command, at most "
                    f"{self._deviation[index]:g}",
                )
        return self.motion

    def command(self, now: float) -> NDArray[np.float64] | None:
        """Return where the joints are to be at `now`; None before any motion.

        rad or m [J].
        """
        if self.motion is None:
            return None
        is_early = now < self.motion.start
        return (self._before if is_early and self._before is not None else self.motion).at(now)[0]

    def is_moving(self, now: float) -> bool:
        """Tell whether the joints are to move after `now`."""
        return self.motion is not None and now < self.motion.end

    def state_age(self, now: float) -> float:
        """Return the age in s of the oldest joint's position; inf before all were seen."""
        return now - float(self._measured_at.min())

    def mode(self, now: float) -> Mode:
        """Return what the arm does at `now`."""
        if self.is_moving(now):
            return Mode.FOLLOWING if self.follows else Mode.BRAKING
        return Mode.STOPPED if self.stopped else Mode.WAITING

    def _stale(self, now: float) -> str:
        index = int(self._measured_at.argmin())
        age = f"is {self.state_age(now):.2f} s old, at most {self.settings.max_state_age:g}"
        seen = math.isfinite(self._measured_at[index])
        return (
            f"the position of joint {self.contract.ros_names[index]} {age if seen else 'was never received'}"
        )

    def _check_clock(self, now: float, wall: int) -> None:
        last, self._last = self._last, (now, wall)
        if last is None:
            return
        elapsed = now - last[0]
        if elapsed < 0:  # simulated time that starts again
            self.counts["clock_jumps"] += 1
            self._measured_at[:] = -math.inf
            self.start(wall)
        elif abs((wall - last[1]) * 1e-9 - elapsed) > JUMP_S:
            self.counts["clock_jumps"] += 1
            self._order = ChunkOrder(wall)
            self.drop(now)
        else:
            self._make_up(last[0], elapsed)

    def _make_up(self, last: float, elapsed: float) -> float:
        """Delay motions by what a command is late, and return that in s.

        The time is made up for later, not at once. last: s, of the command before. elapsed: s, since then.
        """
        late = elapsed - LONGEST_STEP * self._period
        if late <= 0 or self.contract.controller.kind != FORWARD or not self.is_moving(last):
            return 0.0
        self.motion = replace(self.motion, start=self.motion.start + late)
        if self._before is not None:
            self._before = replace(self._before, start=self._before.start + late)
        return late

    def _catch_up(self, now: float) -> None:
        """Make up before a motion is replaced: `now` may be long after the last command."""
        if self._last is not None:
            late = self._make_up(self._last[0], now - self._last[0])
            self._last = self._last[0] + late, self._last[1] + round(late * 1e9)
