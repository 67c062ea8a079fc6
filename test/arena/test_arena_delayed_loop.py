# SPDX-License-Identifier: Apache-2.0
"""Drives with late plans: rows, ages, and what the robot does meanwhile."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from edgellm_arena.driving import expert
from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.delayed_loop import Execution, delay_in_steps, drive_delayed
from edgellm_arena.episodes.episode import Outcome, World, make_episode

STOPPED = None


class EnoughError(Exception):
    """The drive is long enough."""


class RecordingWorld(World):
    """Stores the curvature of each step, and ends after a number of steps."""

    def __init__(self, most: int) -> None:
        super().__init__(make_episode(3))
        self.most = most
        self.curvatures: list[float] = []

    def step(self, accel, curvature):
        self.curvatures.append(curvature)
        outcome = super().step(accel, curvature)
        if len(self.curvatures) == self.most:
            raise EnoughError
        return outcome


class NumberedRows:
    """A planner whose curvatures tell plan and row: 0.0001 (100 plan + row)."""

    def __init__(self, world: World, accel: float = 0.02, rows: int = 40) -> None:
        self.world, self.accel, self.rows = world, accel, rows
        self.calls: list[tuple[int, int, float]] = []  # step of the call, age, speed

    def __call__(self, frame, age: int) -> Plan:
        number = len(self.calls)
        self.calls.append((round(self.world.time / 0.1), age, self.world.state.speed))
        curvatures = (100 * number + np.arange(self.rows)) * 1e-4
        return Plan("", np.stack([np.full(self.rows, self.accel), curvatures], 1))


def driven_rows(world: RecordingWorld) -> list[tuple[int, int]]:
    """Plan and row of each step with a curvature."""
    numbers = np.rint(np.array(world.curvatures) * 1e4).astype(int)
    return [divmod(int(number), 100) for number in numbers]


def drive_for(most: int, delay: int, execution: Execution, **fields) -> tuple[RecordingWorld, NumberedRows]:
    world = RecordingWorld(most)
    planner = NumberedRows(world, **fields)
    with pytest.raises(EnoughError):
        drive_delayed(world, planner, delay_steps=delay, execution=execution)
    return world, planner


def rows(plan: int, *span: int) -> list[tuple[int, int]]:
    return [(plan, row) for row in range(*span)]


def test_a_plan_takes_over_at_the_row_of_its_age():
    world, planner = drive_for(32, 4, Execution.ASYNC)
    # frames at 4 (the robot stood), 12 and 20
    assert driven_rows(world)[4:] == [*rows(0, 12), *rows(1, 4, 12), *rows(2, 4, 12)]
    assert [call[:2] for call in planner.calls] == [(4, 0), (16, 4), (24, 4)]


def test_if_the_delay_exceeds_the_frames_interval_a_takeover_takes_the_next_frame():
    world, planner = drive_for(50, 10, Execution.ASYNC)
    assert driven_rows(world)[10:] == [*rows(0, 20), *rows(1, 10, 20), *rows(2, 10, 20)]
    assert [call[:2] for call in planner.calls] == [(10, 0), (30, 10), (40, 10)]


def test_the_speed_continues_where_a_plan_takes_over():
    world, _ = drive_for(40, 4, Execution.ASYNC, accel=0.03)
    assert np.diff(world.track[4:, 3]) == pytest.approx(0.003)


def test_a_plan_later_than_its_last_row_leaves_the_robot_braking():
    world, planner = drive_for(4 * 41 + 5, 41, Execution.ASYNC, accel=0.035)
    speeds = world.track[:, 3]
    assert speeds[81] == pytest.approx(0.14)  # after all rows of plan 0
    assert 0 < speeds[82] < 0.14  # at the frame of plan 1, which arrives at 123
    assert speeds[123:164].max() == 0
    assert [call[:2] for call in planner.calls] == [(41, 0), (123, 41), (164, 0)]
    assert driven_rows(world)[164:] == rows(2, 5)


def test_waiting_means_to_stand_from_the_frame_to_its_plan():
    world, planner = drive_for(40, 4, Execution.WAIT, accel=0.1)
    (first, _, _), (second, _, _) = planner.calls[:2]
    assert [call[1:] for call in planner.calls] == [(4, 0.0)] * len(planner.calls)
    assert first == 4
    assert driven_rows(world)[first : first + 8] == rows(0, 8)
    assert world.track[second - 4 : second + 1, 3].max() == 0  # from the frame on
    assert world.track[first + 8 : second - 4, 3].min() > 0  # it brakes until then
    assert driven_rows(world)[second : second + 8] == rows(1, 8)


def test_without_delay_waiting_is_the_same_as_driving_on():
    tracks = []
    for execution in Execution:
        world, _ = drive_for(24, 0, execution)
        assert driven_rows(world) == [*rows(0, 8), *rows(1, 8), *rows(2, 8)]
        tracks.append(world.track)
    assert np.array_equal(*tracks)


def test_the_robot_brakes_on_an_answer_that_does_not_drive():
    world = World(make_episode(3))
    answers = iter([Plan("go", np.tile([0.5, 0.0], (40, 1)))])
    driven = drive_delayed(world, lambda frame, age: next(answers, Plan("no", None)), delay_steps=3)
    assert world.outcome is Outcome.TIMEOUT
    assert driven.drivers[:20] == (*[STOPPED] * 3, *[0] * 11, *[STOPPED] * 6)
    assert world.track[22:, 3].max() == 0


def test_a_frame_whose_plan_would_come_after_the_end_is_not_planned():
    world = World(make_episode(3))
    calls = []

    def think(frame, age):
        calls.append(round(world.time / 0.1))
        return Plan("", np.tile([0.2, 0.0], (40, 1)))

    drive_delayed(world, think, delay_steps=8)
    steps = len(world.track) - 1
    assert world.outcome is Outcome.COLLISION
    assert calls == [8, *range(24, steps, 8)]  # frames at 8, 16, 24 ...
    assert len(calls) > 2


def test_the_expert_reaches_the_target_with_a_delay():
    world = World(make_episode(3))
    rng = np.random.default_rng(0)
    states = []

    def think(frame, age):
        states.append(world.track[-1 - age])
        seen = type(world.state)(*states[-1])
        return Plan("", expert.plan(world.scene, seen, world.episode.target, rng))

    drive_delayed(world, think, delay_steps=8)
    assert world.outcome is Outcome.SUCCESS


def test_a_drive_without_delay_is_that_of_the_lock_step():
    tracks = []
    for driver in (drive_delayed, lambda world, think: drive(world, think, latency_steps=0)):
        world, numbers = World(make_episode(3)), count()

        def think(frame, age=0, world=world, numbers=numbers):
            return Plan("", np.tile([0.1, 0.2 * (-1) ** next(numbers)], (40, 1)))

        driver(world, think)
        tracks.append(world.track)
    np.testing.assert_allclose(*tracks, rtol=0, atol=1e-12)  # steering back to the path rounds


@pytest.mark.parametrize("seconds, steps", [(0.0, 0), (0.1, 1), (0.3, 3), (0.31, 4), (0.8, 8), (1.1, 11)])
def test_a_delay_is_rounded_up_to_steps(seconds, steps):
    assert delay_in_steps(seconds) == steps


@pytest.mark.parametrize("delay_steps, replan_steps", [(-1, 8), (0, 0)])
def test_impossible_steps_are_refused(delay_steps, replan_steps):
    with pytest.raises(ValueError, match="delay_steps >= 0 and replan_steps >= 1"):
        drive_delayed(
            World(make_episode(3)), lambda frame, age: Plan("", None), delay_steps=delay_steps,
            replan_steps=replan_steps,
        )  # fmt: skip


def test_the_action_that_the_old_plan_had_at_a_takeover_is_recorded():
    world = World(make_episode(3))
    accelerations = iter([0.1, 0.2])

    def think(frame, age):
        return Plan("", np.tile([next(accelerations, 0.0), 0.3], (40, 1)))

    driven = drive_delayed(world, think, delay_steps=4)
    first = driven.continuations[16]  # the second plan, for the frame of step 12, takes over
    assert first == pytest.approx((0.1, 0.3))
    assert driven.continuations[24] == pytest.approx((0.2, 0.3))
