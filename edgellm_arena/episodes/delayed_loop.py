# SPDX-License-Identifier: Apache-2.0
"""Drives an episode whose plans arrive a simulated time after their frames.

While a plan is computed, the robot either follows the plan before it (`async`) or stands (`wait`). The robot
executes speeds and curvatures as they are planned and does not correct its path, so its motion shows what a
new plan changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from edgellm_arena.driving.expert import brake
from edgellm_arena.episodes.closed_loop import REPLAN_STEPS, Course, Drive, Plan, course_of, record_plan
from edgellm_arena.episodes.episode import PlanRecord, World
from edgellm_arena.world.unicycle import DT, State, clip_action


class Execution(str, Enum):
    """What the robot does while a plan is computed.

    ASYNC: it follows the old plan; the new one takes over at the row of its age. Frames are taken every
    `replan_steps`, or when a plan takes over if plans take longer. The diagram has a delay of 4 steps:

        step        8     9    10    11    12    13    14    15    16    17    18    19    20
        frame       B                                              C
        executed   A[8]  A[9] A[10] A[11] B[4]  B[5]  B[6]  B[7]  B[8]  B[9] B[10] B[11] C[4]

    WAIT: it stands. After `replan_steps` rows of a plan the robot brakes to a standstill; then the frame is
    taken, and its plan is driven from the first row. Without delay, the robot does not brake for a frame.
    """

    ASYNC = "async"
    WAIT = "wait"


def delay_in_steps(seconds: float) -> int:
    """Return a delay in steps of DT, rounded up."""
    return math.ceil(seconds / DT - 1e-6)


def drive_delayed(
    world: World,
    think: Callable[[NDArray[np.uint8], int], Plan],
    on_step: Callable[[], None] = lambda: None,
    delay_steps: int = 0,
    execution: Execution = Execution.ASYNC,
    replan_steps: int = REPLAN_STEPS,
) -> Drive:
    """Drive until the episode's outcome is settled, with delayed plans.

    A plan arrives `delay_steps` after its frame. `think(frame, age)` is called `age` steps after the frame
    [H, W, 3] RGB was taken and returns its plan. `on_step` is called after each step of the world. The robot
    brakes, with the curvature that it has, if it has no plan, no actions in its plan, or no rows left. A
    robot that stands, and that its plan lets stand for `delay_steps`, sees the same at the end of this time:
    its frame is taken then, with an age of 0, so that its plan begins with the first row. ValueError for a
    negative delay or replan_steps below 1.
    """
    if delay_steps < 0 or replan_steps < 1:
        raise ValueError(
            f"expected delay_steps >= 0 and replan_steps >= 1, got {delay_steps} and {replan_steps}"
        )
    robot = _Robot(world, on_step)
    plans: list[PlanRecord] = []
    waits = execution is Execution.WAIT and delay_steps > 0
    while not world.done:
        if waits:
            robot.stop()
        age = delay_steps
        if not waits and robot.stands(delay_steps):
            robot.go(delay_steps)
            age = 0
        if world.done:
            break
        time, state, frame = world.time, world.state, world.camera()
        robot.go(age)
        if world.done:  # the plan would come too late
            break
        plan = think(frame, age)
        plans.append(record_plan(time, state, frame, plan))
        robot.take(plan.actions, state.speed, 0 if waits else age)
        robot.go(replan_steps if waits else max(replan_steps, delay_steps) - age)
    return Drive(tuple(plans), robot.clipped, tuple(robot.drivers), robot.continuations)


class _Robot:
    """Executes the plan in charge, step by step."""

    def __init__(self, world: World, on_step: Callable[[], None]) -> None:
        self.clipped = 0
        self.drivers: list[int | None] = []
        self.continuations: dict[int, tuple[float, float]] = {}
        self._world, self._on_step = world, on_step
        self._number = -1
        self._row = 0
        self._curvature = 0.0
        self.stop_following()

    def stop_following(self) -> None:
        """Drop the plan in charge."""
        self._actions, self._course = np.zeros((0, 2)), Course(np.zeros((1, 4)), np.zeros(0))

    def take(self, actions: NDArray | None, speed: float, row: int) -> None:
        """Put the next plan in charge from `row` on; `speed` is that of its frame."""
        if self._row < len(self._actions):
            old = self._course.action(self._row, self._world.state.speed)
            self.continuations[len(self.drivers)] = old
        self._number += 1
        self.stop_following()
        if actions is not None:
            self._actions = np.asarray(actions, np.float64)
            self._course = course_of(State(speed=speed), self._actions)
        self._row = row

    def go(self, steps: int) -> None:
        """Execute up to `steps` steps, fewer if the episode ends."""
        for _ in range(steps):
            if self._world.done:
                return
            self._step()

    def stop(self) -> None:
        """Drop the plan and brake to a standstill."""
        self.stop_following()
        while self._world.state.speed > 0 and not self._world.done:
            self._step()

    def stands(self, steps: int) -> bool:
        """Return True if the robot stands and will stand for `steps` steps."""
        ahead = self._course.speeds[self._row : self._row + steps]
        return self._world.state.speed == 0 and not ahead.any()

    def _step(self) -> None:
        speed = self._world.state.speed
        if self._row < len(self._actions):
            accel, self._curvature = self._course.action(self._row, speed)
            planned = self._actions[self._row]
            self.clipped += bool(np.any(np.stack(clip_action(*planned)) != planned))
            self.drivers.append(self._number)
            self._row += 1
        else:
            accel = brake(speed, 1)[0, 0]
            self.drivers.append(None)
        self._world.step(accel, self._curvature)
        self._on_step()
