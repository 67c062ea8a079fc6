# SPDX-License-Identifier: Apache-2.0
"""Plays an episode in closed loop, whoever makes the chunks and follows them.

Time is simulated, and a chunk takes a fixed number of steps whatever its real duration: so an episode is the
same on every computer. The arm follows the old chunk until the new one is there; what is before the present
in the new chunk is not executed. The diagram has a delay of 4 steps:

    step       0     1    ...   4     5    ...   7     8     9   ...  11    12    13
    frame      A                B                      C                    D
    executed   -     -    ...  A[4]  A[5]  ...  A[7]  B[4]  B[5] ... B[7]  C[4]  C[5]
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from edgellm_tabletop.episodes.robot import Plan, Robot
from edgellm_tabletop.world import GOALS, MOST_STEPS, STEP_S

REPLAN_STEPS = 10  # steps between two frames without a delay
OUTCOMES = ("placed", "lost", "timeout")


class Driver(Protocol):
    """Makes chunks from what it sees, and has the arm follow them."""

    def look(self) -> Any:
        """Return what a chunk is computed from, at the time of its frame."""

    def answer(self, seen: Any) -> Plan:
        """Compute the chunk for what was seen, and have the arm follow it from now on."""

    def on_tick(self) -> None:
        """Take notice of simulated time that has passed."""


def goal_of(seed: int) -> str:
    """Return where the mark is in the episode of a seed."""
    return list(GOALS)[seed % len(GOALS)]


def delay_in_steps(seconds: float) -> int:
    """Return a delay in steps, rounded up."""
    return math.ceil(seconds / STEP_S - 1e-6)


def play(
    robot: Robot,
    driver: Driver,
    delay_steps: int = 0,
    replan_steps: int | None = None,
    at_rest: bool = False,
) -> str:
    """Play until the episode has ended; return its outcome, one of OUTCOMES.

    A chunk is followed `delay_steps` after its frame. Frames are taken every `replan_steps`, or when a chunk
    is there if that takes longer; None: as soon as a chunk is there, and every REPLAN_STEPS without a delay.
    If `at_rest`, they are taken once the arm stands. An arm that stands sees the same at the end of this
    time: its frame is taken then, so that its chunk begins with the first row.
    ValueError for a negative delay or replan_steps below 1.
    """
    if replan_steps is None:
        replan_steps = max(delay_steps, 0) or REPLAN_STEPS
    if delay_steps < 0 or replan_steps < 1:
        raise ValueError(
            f"expected delay_steps >= 0 and replan_steps >= 1, got {delay_steps} and {replan_steps}"
        )
    world = robot.world

    def go(steps: int) -> None:
        for _ in range(steps):
            if not world.ended:
                robot.step(driver.on_tick)

    while not world.ended:
        age = delay_steps
        if robot.stands():
            go(delay_steps)
            age = 0
        if world.ended:
            break
        begin, seen = world.steps, driver.look()
        go(age)
        if world.ended:  # the chunk would come too late
            break
        robot.record.plans.append((begin, driver.answer(seen)))
        go(max(replan_steps, age) - age)
        while at_rest and not (world.ended or robot.stands()):
            go(1)
    return outcome_of(robot)


def outcome_of(robot: Robot) -> str:
    """Return how an episode has ended: placed, timeout, or lost.

    A block is lost if it leaves the table.
    """
    if robot.world.succeeded:
        return "placed"
    return "timeout" if robot.world.steps >= MOST_STEPS else "lost"
