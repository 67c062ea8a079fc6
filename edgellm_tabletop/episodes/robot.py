# SPDX-License-Identifier: Apache-2.0
"""The simulated arm with its controller, and a record of what it does.

step (0.1 s) = 5 ticks (joint states) = 10 periods of the controller = 50 steps of the simulation
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm_tabletop.episodes.controller import NANOSECONDS, TrajectoryController
from edgellm_tabletop.world import STEP_S, Tabletop

Array = NDArray[np.float64]
TICK_S = 0.02  # between joint states
PERIOD_S = 0.01  # of the controller
TICKS, PERIODS = round(STEP_S / TICK_S), round(TICK_S / PERIOD_S)  # of a step, of a tick
TICK_NS, PERIOD_NS = (round(each * NANOSECONDS) for each in (TICK_S, PERIOD_S))
START_NS = 10 * NANOSECONDS  # in ROS, time 0 means that there is no time


@dataclass(frozen=True)
class Moment:
    """The world at the beginning of a step, or at the end of the episode."""

    pose: Array  # of all joints of the simulation
    gripper: Array  # [3] m, between the jaws
    block: Array  # [3] m
    opening: float  # of the gripper, percent


@dataclass(frozen=True)
class Plan:
    """A chunk of joint targets, and how long it took."""

    targets: NDArray[np.float32]  # [T, 6] in the policy's units
    seconds: float  # by this computer's clock
    refused: str = ""  # the reason of edgellm_arm, if it did not follow the chunk
    node_seconds: float = 0.0  # of which the edgellm node planned; the rest is on topics


@dataclass
class Record:
    """An episode as it was played."""

    moments: list[Moment] = field(default_factory=list)
    plans: list[tuple[int, Plan]] = field(default_factory=list)  # with the step of the frame
    positions: list[Array] = field(default_factory=list)  # commanded, of each period of the controller
    speeds: list[Array] = field(default_factory=list)


class Robot:
    """Moves the world's arm along trajectories. `now` is simulated time in ns."""

    def __init__(self, world: Tabletop, now: int) -> None:
        self.world, self.now = world, now
        self.controller = TrajectoryController(world.positions)
        self.record = Record()

    def reset(self, seed: int, goal: str) -> None:
        """Begin an episode; the controller holds the rest position."""
        self.world.reset(seed, goal)
        self.controller.hold(self.world.positions)
        self.record = Record()

    def stands(self) -> bool:
        """Tell whether the arm is commanded to rest."""
        return self.now >= self.controller.end

    def step(self, on_tick: Callable[[], None]) -> None:
        """Move for STEP_S, and judge the episode; `on_tick` is called after each tick."""
        if not self.record.moments:
            self.record.moments.append(self._moment())
        self.world.watch()
        for _ in range(TICKS):
            self.tick()
            on_tick()
        self.world.judge()
        self.record.moments.append(self._moment())

    def tick(self) -> None:
        """Move for TICK_S."""
        for _ in range(PERIODS):
            self.now += PERIOD_NS
            positions, speeds = self.controller.at(self.now)
            self.record.positions.append(positions)
            self.record.speeds.append(speeds)
            self.world.move(positions, PERIOD_S)

    def _moment(self) -> Moment:
        world = self.world
        return Moment(world.pose, world.gripper, world.block, float(world.state[-1]))
