# SPDX-License-Identifier: Apache-2.0
"""Driving an episode: look, think, act on the old plan while thinking, then on the new one.

Time is simulated and thinking takes a fixed number of steps of it, however long it takes on the clock of
the computer: an episode is the same on every machine.

    step            0     1     2     3     4     5     6     7     8     9    10    11
    frame           A                                               B
    executed      old   old   old   A[3]  A[4]  A[5]  A[6]  A[7]  A[8]  A[9] A[10]  B[3]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm_ros.arena.episode import PlanRecord, World
from edgellm_ros.arena.expert import brake
from edgellm_ros.arena.unicycle import DT, State, clip_action, rollout

REPLAN_STEPS = 8  # steps of DT from one look to the next
LATENCY_STEPS = 3  # steps from a look to the first action that comes of it


@dataclass(frozen=True)
class Plan:
    """An answer: words, and actions [T, 2] (m/s^2, 1/m) from the moment of the look, None where it is not
    to drive.

    others [n, T, 2]: further samples of the actions, which are drawn but not driven.
    """

    text: str
    actions: NDArray | None
    others: NDArray | None = None


@dataclass(frozen=True)
class Drive:
    """How an episode was driven. clipped: steps whose planned action was beyond the robot's
    limits."""

    plans: tuple[PlanRecord, ...]
    clipped: int


def drive(
    world: World,
    think: Callable[[NDArray[np.uint8]], Plan],
    on_step: Callable[[], None] = lambda: None,
    replan_steps: int = REPLAN_STEPS,
    latency_steps: int = LATENCY_STEPS,
) -> Drive:
    """Drive until the episode's outcome is settled; `think` turns a camera frame [H, W, 3] RGB into a plan.

    `on_step` is called after each step of the world. The robot stands until its first plan, which then starts
    with its first action, and brakes on a plan without actions. It keeps to the speeds of the plan.
    ValueError for a plan too short to last until the next one takes over.
    """
    if not 0 <= latency_steps <= replan_steps or replan_steps < 1:
        raise ValueError(
            f"latency_steps {latency_steps} must be from 0 to replan_steps; that, {replan_steps}, at least 1"
        )
    plans: list[PlanRecord] = []
    clipped = 0
    course = _course(world.state.speed, brake(world.state.speed))
    while not world.done:
        frame = world.camera()
        plan = think(frame)
        plans.append(_record(world, frame, plan))
        actions = brake(world.state.speed) if plan.actions is None else np.asarray(plan.actions, np.float64)
        if len(actions) < replan_steps + latency_steps:
            raise ValueError(
                f"a plan of {len(actions)} actions is shorter than {replan_steps} + {latency_steps} steps"
            )
        waiting = course.speeds[replan_steps : replan_steps + latency_steps]
        if world.state.speed == 0 and not waiting.any():  # it stands while thinking: nothing is missed
            actions = np.concatenate([np.zeros((latency_steps, 2)), actions])
        fresh = _course(world.state.speed, actions)
        for index in range(replan_steps):
            if index < latency_steps:
                action = course.action(replan_steps + index, world.state.speed)
            else:
                action = fresh.action(index, world.state.speed)
                clipped += bool(np.any(np.stack(clip_action(*actions[index])) != actions[index]))
            world.step(*action)
            on_step()
            if world.done:
                break
        course = fresh
    return Drive(tuple(plans), clipped)


@dataclass(frozen=True)
class _Course:
    """What the robot's controller follows from a look on: the speed in m/s to have at the end of each step
    [T], and the curvature in 1/m during it [T].

    Following the plan's speed rather than its bare accelerations keeps what went otherwise while the robot
    was thinking from adding up: of 80 episodes 8 ended in a collision with accelerations, none with speeds
    (an early checkpoint, seeds 60000 to 60079).
    """

    speeds: NDArray[np.float64]
    curvatures: NDArray[np.float64]

    def action(self, index: int, speed: float) -> tuple[float, float]:
        """Acceleration and curvature for step `index` at the present speed; the world clips them."""
        return float((self.speeds[index] - speed) / DT), float(self.curvatures[index])


def _course(speed: float, actions: NDArray) -> _Course:
    return _Course(rollout(State(speed=speed), actions)[1:, 3], actions[:, 1])


def _record(world: World, frame: NDArray[np.uint8], plan: Plan) -> PlanRecord:
    """The plan with its ways in the base frame."""
    here = State(speed=world.state.speed)
    path = None if plan.actions is None else rollout(here, plan.actions)
    others = None if plan.others is None else np.stack([rollout(here, actions) for actions in plan.others])
    return PlanRecord(world.time, world.state, frame, plan.text, path, others)
