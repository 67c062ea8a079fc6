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
from edgellm_ros.arena.unicycle import State, clip_action, rollout

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
    """How an episode was driven. clipped: executed actions that were beyond the robot's limits."""

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
    with its first action, and brakes on a plan without actions. ValueError for a plan too short to last until
    the next one takes over.
    """
    if not 0 <= latency_steps <= replan_steps or replan_steps < 1:
        raise ValueError(
            f"latency_steps {latency_steps} must be from 0 to replan_steps; that, {replan_steps}, at least 1"
        )
    plans: list[PlanRecord] = []
    clipped = 0
    actions: NDArray = brake(world.state.speed)
    while not world.done:
        frame = world.camera()
        plan = think(frame)
        plans.append(_record(world, frame, plan))
        fresh = brake(world.state.speed) if plan.actions is None else np.asarray(plan.actions, np.float64)
        if len(fresh) < replan_steps + latency_steps:
            raise ValueError(
                f"a plan of {len(fresh)} actions is shorter than {replan_steps} + {latency_steps} steps"
            )
        missed = actions[replan_steps : replan_steps + latency_steps]
        if world.state.speed == 0 and not missed.any():  # it stands while thinking: nothing is missed
            fresh = np.concatenate([np.zeros((latency_steps, 2)), fresh])
        for index in range(replan_steps):
            if plan.actions is None and index == latency_steps:
                fresh[index:] = brake(world.state.speed, len(fresh) - index)
            row = actions[replan_steps + index] if index < latency_steps else fresh[index]
            clipped += bool(np.any(np.stack(clip_action(*row)) != row))
            world.step(float(row[0]), float(row[1]))
            on_step()
            if world.done:
                break
        actions = fresh
    return Drive(tuple(plans), clipped)


def _record(world: World, frame: NDArray[np.uint8], plan: Plan) -> PlanRecord:
    """The plan with its ways in the base frame."""
    here = State(speed=world.state.speed)
    path = None if plan.actions is None else rollout(here, plan.actions)
    others = None if plan.others is None else np.stack([rollout(here, actions) for actions in plan.others])
    return PlanRecord(world.time, world.state, frame, plan.text, path, others)
