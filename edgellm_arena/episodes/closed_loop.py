# SPDX-License-Identifier: Apache-2.0
"""Drives an episode in closed loop.

The robot follows the old plan while the model computes the next one. Time is simulated. Inference takes a
fixed number of simulated steps, whatever its real duration, so an episode is the same on every machine. The
robot has odometry and steers back to the path of the plan that it executes: a plan begins where its frame was
taken, and the old plan may have led elsewhere by the time it takes over.

    step            0     1     2     3     4     5     6     7     8     9    10    11
    frame           A                                               B
    executed      old   old   old   A[3]  A[4]  A[5]  A[6]  A[7]  A[8]  A[9] A[10]  B[3]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm_arena.driving.expert import brake
from edgellm_arena.episodes.episode import PlanRecord, World
from edgellm_arena.world.unicycle import DT, State, clip_action, rollout, to_base, wrap

REPLAN_STEPS = 8  # steps of DT between two camera frames
LATENCY_STEPS = 3  # steps from a camera frame to the first action planned from it
# 1/m of curvature for each metre beside the path, and for each radian off its heading. The robot is back
# on the path within 2 m, with a damping ratio of 0.7.
_PER_METRE, _PER_RADIAN = 8.0, 4.0


@dataclass(frozen=True)
class Plan:
    """The model's answer to one camera frame."""

    text: str
    actions: NDArray | None  # [T, 2] (m/s^2, 1/m) from the time of the frame; None for words only
    others: NDArray | None = None  # further samples of the actions [n, T, 2], not driven


@dataclass(frozen=True)
class Drive:
    """Record of an episode that was driven."""

    plans: tuple[PlanRecord, ...]
    clipped: int  # steps whose planned action exceeded the robot's limits
    # `drive_delayed` records: of each step the index of its plan, or None while braking; of a step in which a
    # plan takes over, the action of the plan before it.
    drivers: tuple[int | None, ...] = ()
    continuations: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def drive(
    world: World,
    think: Callable[[NDArray[np.uint8]], Plan],
    on_step: Callable[[], None] = lambda: None,
    replan_steps: int = REPLAN_STEPS,
    latency_steps: int = LATENCY_STEPS,
    command: Callable[[State], tuple[float, float]] | None = None,
) -> Drive:
    """Drive until the episode's outcome is settled.

    `think` turns a camera frame [H, W, 3] RGB into a plan. `on_step` is called after each step of the world.
    The robot waits for its first plan, executes that plan from its first action, and brakes if a plan has no
    actions. It follows the speeds and the path of the plan. ValueError if a plan is too short to last until
    the next plan takes over. `command` turns the robot's state into the action (acceleration, curvature) of
    the next step, instead of the plans: for a driver that gets the plans by another way.
    """
    if not 0 <= latency_steps <= replan_steps or replan_steps < 1:
        raise ValueError(
            f"expected 0 <= latency_steps <= replan_steps and replan_steps >= 1, got latency_steps "
            f"{latency_steps} and replan_steps {replan_steps}"
        )
    plans: list[PlanRecord] = []
    clipped = 0
    course = course_of(world.state, brake(world.state.speed))
    while not world.done:
        frame = world.camera()
        plan = think(frame)
        plans.append(record_plan(world.time, world.state, frame, plan))
        actions = brake(world.state.speed) if plan.actions is None else np.asarray(plan.actions, np.float64)
        if len(actions) < replan_steps + latency_steps:
            raise ValueError(
                f"the plan has {len(actions)} actions, expected at least {replan_steps + latency_steps} "
                f"(replan_steps {replan_steps} + latency_steps {latency_steps})"
            )
        waiting = course.speeds[replan_steps : replan_steps + latency_steps]
        if world.state.speed == 0 and not waiting.any():  # at rest during inference: skip no action
            actions = np.concatenate([np.zeros((latency_steps, 2)), actions])
        fresh = course_of(world.state, actions)
        for index in range(replan_steps):
            if command is not None:
                action = command(world.state)
            elif index < latency_steps:
                action = course.back_to_path(replan_steps + index, world.state)
            else:
                action = fresh.back_to_path(index, world.state)
                clipped += bool(np.any(np.stack(clip_action(*actions[index])) != actions[index]))
            world.step(*action)
            on_step()
            if world.done:
                break
        course = fresh
    return Drive(tuple(plans), clipped)


@dataclass(frozen=True)
class Course:
    """Speeds, curvatures and path that the controller follows after a camera frame.

    The controller follows the plan's speeds and not its accelerations. Deviations that occur during inference
    then do not accumulate: of 80 episodes, 8 ended in a collision with accelerations and none with
    speeds (an early checkpoint, seeds 60000 to 60079).
    """

    states: NDArray[np.float64]  # before each step, and after the last [T+1, 4]: x, y, heading, speed
    curvatures: NDArray[np.float64]  # 1/m during each step [T]

    @property
    def speeds(self) -> NDArray[np.float64]:
        """Speeds in m/s at the end of each step [T]."""
        return self.states[1:, 3]

    def action(self, index: int, speed: float) -> tuple[float, float]:
        """Return acceleration and curvature for step `index` at the current speed.

        The values are not clipped to the robot's limits.
        """
        return float((self.speeds[index] - speed) / DT), float(self.curvatures[index])

    def back_to_path(self, index: int, state: State) -> tuple[float, float]:
        """Return `action` with a curvature that leads from `state` to the path."""
        accel, curvature = self.action(index, state.speed)
        x, y, heading, _ = self.states[index]
        aside = float(to_base(State(x, y, heading), np.array([state.x, state.y]))[1])
        astray = float(wrap(state.heading - heading))
        return accel, curvature - _PER_METRE * aside - _PER_RADIAN * astray


def course_of(start: State, actions: NDArray) -> Course:
    """Return the course of actions [T, 2] that begin at `start`."""
    return Course(rollout(start, actions), actions[:, 1])


def record_plan(time: float, state: State, frame: NDArray[np.uint8], plan: Plan) -> PlanRecord:
    """Record a plan for the frame of `time` and `state`, with its paths.

    `time` is in seconds; the paths are in the base frame.
    """
    here = State(speed=state.speed)
    path = None if plan.actions is None else rollout(here, plan.actions)
    others = None if plan.others is None else np.stack([rollout(here, actions) for actions in plan.others])
    return PlanRecord(time, state, frame, plan.text, path, others)
