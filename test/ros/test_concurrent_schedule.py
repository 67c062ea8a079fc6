# SPDX-License-Identifier: Apache-2.0
"""Which jobs run side by side, without threads and with a clock of the test."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from edgellm_ros.ros.node.worker.job import Job
from edgellm_ros.ros.node.worker.schedule import (
    DRIVING_LEVEL,
    GONE_LEVEL,
    KEPT_S,
    Schedule,
)

MOST = 4


def goal(name: str, client: str = "", **fields: object) -> Job:
    fields = {"client": client, "arrival": 0.0, **fields}
    return Job(name, 30.0, lambda outcome: None, **fields)


def frame(name: str = "frame", **fields: object) -> Job:
    return goal(name, is_driving=True, **fields)


def change(name: str = "loras") -> Job:
    return goal(name, is_plan=False, runs_alone=True)


def start(schedule: Schedule, now: float = 0.0, driving_plans_per_goal: int = 1) -> list[str]:
    """Start what may start now; return the names."""
    return [job.request for job in iter(lambda: schedule.take(driving_plans_per_goal, now), None)]


def end(schedule: Schedule, name: str, now: float = 0.0) -> None:
    schedule.end(next(job for job in schedule.running if job.request == name), now)


def levels(schedule: Schedule) -> dict[str, int]:
    return {job.request: job.level for job in schedule.running}


@pytest.fixture
def schedule() -> Schedule:
    return Schedule(MOST)


def test_driving_starts_beside_running_goals_and_above_them(schedule):
    schedule.goals += [goal(name, name) for name in "abcd"]
    assert start(schedule) == ["a", "b", "c", "d"]
    schedule.driving = frame()
    assert start(schedule) == ["frame"]
    assert levels(schedule) == {"a": 0, "b": 0, "c": 0, "d": 0, "frame": DRIVING_LEVEL}


def test_one_plan_of_driving_runs_at_a_time(schedule):
    schedule.driving = frame("old")
    start(schedule)
    schedule.driving = frame("new")
    assert start(schedule) == []
    end(schedule, "old")
    assert start(schedule) == ["new"]


@pytest.mark.parametrize(("pause", "kept"), [(KEPT_S - 0.1, True), (KEPT_S, False)])
def test_a_place_is_kept_for_driving_whose_plans_come_without_long_pauses(schedule, pause, kept):
    schedule.driving = frame("first")
    start(schedule, 1.0)
    end(schedule, "first", 2.0)
    schedule.driving = frame("second")
    schedule.goals += [goal(name, name) for name in "abcd"]
    assert start(schedule, 2.0 + pause) == ["second", "a", "b", "c"]
    end(schedule, "second", 4.0)
    started = [start(schedule, 4.0 + passed) for passed in (KEPT_S - 0.1, KEPT_S)]
    assert started == ([[], ["d"]] if kept else [["d"], []])


def test_the_last_place_is_for_another_client(schedule):
    schedule.goals += [goal(f"a{i}", "a") for i in range(5)]
    assert start(schedule) == ["a0", "a1", "a2"]
    schedule.goals.append(goal("b0", "b"))
    assert start(schedule) == ["b0"]
    end(schedule, "b0")
    assert start(schedule) == []
    end(schedule, "a0")
    assert start(schedule) == ["a3"]


def test_a_client_with_fewer_running_goals_is_next(schedule):
    schedule.goals += [goal("a0", "a"), goal("a1", "a")]
    assert start(schedule) == ["a0", "a1"]
    schedule.goals.append(goal("b0", "b"))
    assert start(schedule) == ["b0"]
    schedule.goals += [goal("a2", "a"), goal("b1", "b")]
    assert start(schedule) == ["b1"]  # b had the last turn, and has one running goal to the two of a


def test_goals_of_a_higher_priority_are_next_at_their_level(schedule):
    schedule.goals += [
        goal("low", "low", priority=-2), goal("0", "b"), goal("high", "high", priority=3), goal("1", "c"),
    ]  # fmt: skip
    assert start(schedule) == ["high", "0", "1", "low"]
    assert levels(schedule) == {"high": 3, "0": 0, "1": 0, "low": -2}


def test_a_goal_that_waits_gains_a_level_per_second_up_to_the_highest_that_waits():
    schedule = Schedule(1)
    schedule.goals.append(goal("low", "low", priority=-3))
    order = []
    for second in range(6):
        schedule.goals.append(goal("high", "high", priority=1, arrival=float(second)))
        order += start(schedule, float(second))
        end(schedule, order[-1], second + 1.0)
    assert order == ["high"] * 4 + ["low", "high"]


def test_age_gives_a_client_no_turn_of_another_of_its_priority():
    schedule = Schedule(1)
    schedule.goals += [goal(f"a{i}", "a") for i in range(3)]
    schedule.goals.append(goal("b", "b", arrival=50.0))
    order = []
    for _ in range(4):
        order += start(schedule, 60.0)
        end(schedule, order[-1], 60.0)
    assert order == ["a0", "b", "a1", "a2"]


def test_a_change_of_adapters_waits_for_running_plans_and_nothing_passes_it(schedule):
    schedule.goals += [goal("a", "a"), change(), goal("b", "b")]
    assert start(schedule) == ["a"]
    schedule.driving = frame()
    assert start(schedule) == ["frame"]
    end(schedule, "a")
    assert start(schedule) == []
    end(schedule, "frame")
    assert start(schedule) == ["loras"]
    schedule.driving = frame("later")
    assert start(schedule) == []
    end(schedule, "loras")
    assert start(schedule) == ["later", "b"]


def test_frames_at_full_rate_leave_a_change_of_adapters_its_turn(schedule):
    schedule.goals.append(change())
    schedule.driving, started = frame(), []
    for _ in range(4):
        started += start(schedule, driving_plans_per_goal=3)
        schedule.driving = frame()  # waits when the one before ends
        end(schedule, started[-1])
    assert started == ["frame", "frame", "frame", "loras"]


def test_goals_of_a_client_that_left_start_when_nothing_else_waits_or_runs(schedule):
    schedule.goals += [goal("dead", "dead"), goal("a", "a")]
    schedule.gone = {"dead"}
    assert start(schedule) == ["a"]
    end(schedule, "a")
    assert start(schedule) == ["dead"]
    schedule.goals.append(goal("b", "b"))
    assert start(schedule) == ["b"]
    assert levels(schedule) == {"dead": GONE_LEVEL, "b": 0}


@pytest.mark.parametrize("is_command, first_claims", [(False, 2), (True, 10)])
def test_on_the_goals_turn_driving_runs_at_their_level_until_one_has_ended(
    schedule, is_command, first_claims
):
    schedule.goals += [goal("a", "a", priority=2), goal("b", "b")]
    start(schedule)
    schedule.driving, found = frame(is_command=is_command), []
    for number in range(first_claims + 3):
        if number == first_claims + 2:
            end(schedule, "a")
        start(schedule, driving_plans_per_goal=2)
        found.append(levels(schedule)["frame"])
        schedule.driving = frame(is_command=is_command)  # waits when the one before ends
        end(schedule, "frame")
    assert found == [DRIVING_LEVEL] * first_claims + [2, 2, DRIVING_LEVEL]


def test_driving_on_the_goals_turn_rises_to_its_own_level_when_a_goal_ends(schedule):
    schedule.goals += [goal(name, name) for name in "abc"]
    start(schedule)
    risen: list[int] = []
    for name in ("first", "second"):
        schedule.driving = frame(name, on_raised=risen.append)
        start(schedule)
        schedule.driving = frame("waits")
        if name == "first":
            end(schedule, name)
    assert levels(schedule)["second"] == 0
    end(schedule, "a")
    assert levels(schedule) == {"b": 0, "c": 0, "second": DRIVING_LEVEL}
    end(schedule, "b")
    assert risen == [DRIVING_LEVEL]


def test_driving_that_leaves_goals_time_always_has_its_own_level(schedule):
    schedule.goals += [goal("a", "a")]
    start(schedule)
    for _ in range(30):
        schedule.driving = frame()
        start(schedule)
        assert levels(schedule)["frame"] == DRIVING_LEVEL
        end(schedule, "frame")


def test_without_goals_driving_always_has_its_own_level(schedule):
    for _ in range(20):
        schedule.driving = frame()
        start(schedule)
        assert levels(schedule) == {"frame": DRIVING_LEVEL}
        end(schedule, "frame")


@pytest.mark.parametrize(
    ("most", "running", "waiting", "client", "expected"),
    [
        (4, "", "", "a", 0),
        (4, "abcd", "", "e", 1),
        (4, "abcd", "ab", "e", 3),
        (4, "aaa", "", "a", 1),  # the last place is for another client
        (4, "aaa", "", "b", 0),
        (4, "ab", "c", "d", 0),  # c has not started yet
        (1, "", "", "a", 0),
        (1, "a", "ab", "c", 3),
    ],
)
def test_a_goal_waits_if_no_place_is_free_for_its_client(most, running, waiting, client, expected):
    schedule = Schedule(most)
    schedule.goals += [goal(str(i), name) for i, name in enumerate(running)]
    assert len(start(schedule)) == len(running)
    schedule.goals += [goal(str(i), name) for i, name in enumerate(waiting)]
    assert schedule.would_wait(client, 0.0) == expected


class Computer:
    """Computes the running jobs of the highest level together, each as fast as alone."""

    TICK_S = 0.01

    def __init__(self, most: int, priorities: dict[str, int], goal_s: dict[str, float]) -> None:
        self.schedule = Schedule(most)
        self.now = 0.0
        self.ended: dict[str, list[float]] = {name: [] for name in ("driving", *goal_s)}
        self.waits: dict[str, list[float]] = {name: [] for name in goal_s}
        self._left: dict[Job, float] = {}
        self._goal_s, self._priorities = goal_s, priorities
        for name in goal_s:
            self._ask(name)

    def _ask(self, client: str) -> None:
        priority = self._priorities.get(client, 0)
        self.schedule.goals.append(goal(client, client, arrival=self.now, priority=priority))

    def run(self, seconds: float, command_every_s: float, plan_s: float = 0.15) -> Computer:
        commands = 0
        while self.now < seconds:
            if commands * command_every_s <= self.now and self.schedule.driving is None:
                commands += 1
                self.schedule.driving = frame(is_command=True, arrival=self.now)
            while (job := self.schedule.take(1, self.now)) is not None:
                self._left[job] = plan_s if job.is_driving else self._goal_s[job.client]
                if not job.is_driving:
                    self.waits[job.client].append(self.now - job.arrival)
            self.now += self.TICK_S
            highest = max((job.level for job in self.schedule.running), default=0)
            for job in [job for job in self.schedule.running if job.level == highest]:
                self._left[job] -= self.TICK_S
                if self._left[job] <= 1e-9:
                    self._end(job)
        return self

    def _end(self, job: Job) -> None:
        del self._left[job]
        self.schedule.end(job, self.now)
        self.ended["driving" if job.is_driving else job.client].append(self.now)
        if not job.is_driving:
            self._ask(job.client)

    @property
    def longest_gap(self) -> float:
        return max(after - before for before, after in pairwise(self.ended["driving"]))


@pytest.mark.parametrize("command_every_s", [0.0, 0.3, 1.0])
def test_four_clients_that_ask_without_pause_do_not_delay_commands(command_every_s):
    alone = Computer(MOST, {}, {}).run(60.0, command_every_s)
    beside = Computer(MOST, {}, dict.fromkeys("abcd", 0.4)).run(60.0, command_every_s)
    assert beside.longest_gap <= 1.2 * alone.longest_gap
    ended = [len(beside.ended[name]) for name in "abcd"]
    assert min(ended) > 5
    assert max(ended) - min(ended) <= 2


def test_a_client_with_long_goals_does_not_make_others_wait_for_them():
    goal_s = {"long": 5.0, "a": 0.2, "b": 0.2}
    today = Computer(1, {}, goal_s).run(60.0, command_every_s=1.0)
    found = Computer(MOST, {}, goal_s).run(60.0, command_every_s=1.0)
    assert max(found.waits["a"] + found.waits["b"]) < 0.5 < 5.0 < max(today.waits["a"])
    assert len(found.ended["a"]) > 10 * len(today.ended["a"])
    assert len(found.ended["long"]) >= 5


@pytest.mark.parametrize("most", [1, 2, MOST])
def test_a_client_of_the_lowest_priority_does_not_starve(most):
    clients = dict.fromkeys(["low", "h1", "h2", "h3", "h4", "h5"], 0.3)
    computer = Computer(most, {"low": -10, **dict.fromkeys(["h1", "h2", "h3", "h4", "h5"], 10)}, clients)
    computer.run(120.0, command_every_s=0.5)
    assert len(computer.waits["low"]) >= 4
    assert max(computer.waits["low"]) <= 20.0 + 6 * 2 * 0.3 + 0.6  # its age, then a turn of each client


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_keep_the_rules_and_end_every_job(seed):
    rng = random.Random(seed)
    schedule, now, jobs, ended = Schedule(most := rng.choice([1, 2, 3, 4])), 0.0, 0, 0
    share = rng.choice([1, 3])
    while jobs < 80 or schedule.goals or schedule.running or schedule.driving:
        now += rng.choice([0.0, 0.1, 1.0])
        if jobs < 80 and rng.random() < 0.4:
            jobs += 1
            kind = rng.random()
            if kind < 0.3:
                ended += schedule.driving is not None  # replaced
                schedule.driving = frame(is_command=rng.random() < 0.5, arrival=now)
            elif kind < 0.4:
                schedule.goals.append(change())
            else:
                priority = rng.randint(-10, 10)
                schedule.goals.append(goal("goal", rng.choice("abc"), arrival=now, priority=priority))
        schedule.gone = {"c"} if rng.random() < 0.3 else set()
        schedule.take(share, now)
        running = Counter("driving" if job.is_driving else "goals" for job in schedule.running)
        assert running["driving"] <= 1
        assert running.total() <= (most + 1 if most > 1 else 1)
        assert running["goals"] <= most
        if any(job.runs_alone for job in schedule.running):
            assert running.total() == 1
        if schedule.running and rng.random() < 0.5:
            schedule.end(rng.choice(schedule.running), now)
            ended += 1
    assert ended == jobs
