# SPDX-License-Identifier: Apache-2.0
"""The order of jobs, without threads and with a clock of the test."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from edgellm_ros.ros.node.worker.job import Job
from edgellm_ros.ros.node.worker.schedule import COMMANDS_PER_GOAL, Schedule


def job(name: str, client: str = "", **fields: object) -> Job:
    return Job(name, 30.0, lambda outcome: None, **{"client": client, "arrival": 0.0, **fields})


def frame(name: str = "frame", **fields: object) -> Job:
    return job(name, is_driving=True, **fields)


def change(name: str) -> Job:
    """A change of adapters."""
    return job(name, is_plan=False, runs_alone=True)


def run(schedule: Schedule, driving_plans_per_goal: int = 1, now: float = 0.0) -> str | None:
    """Run the next job to its end; return its name, None if none may start."""
    taken = schedule.take(driving_plans_per_goal, now)
    if taken is None:
        return None
    schedule.end(taken, now)
    return taken.request


def order(schedule: Schedule, driving_plans_per_goal: int = 1) -> list[str]:
    """Return the names of the waiting jobs in the order in which they run."""
    return list(iter(lambda: run(schedule, driving_plans_per_goal), None))


def start(schedule: Schedule, now: float = 0.0) -> list[str]:
    """Start what may start now beside what runs; return the names."""
    return [taken.request for taken in iter(lambda: schedule.take(1, now), None)]


def end(schedule: Schedule, name: str, now: float = 0.0) -> None:
    schedule.end(next(each for each in schedule.running if each.request == name), now)


class Robot:
    """A camera, and clients that send their next goal when the last one ends."""

    def __init__(self, clients: dict[str, float], camera_s: float = 0.1, plan_s: float = 0.15) -> None:
        """`clients`: the duration of each client's goals."""
        self.schedule = Schedule()
        self.clients = clients
        self.camera_s, self.plan_s = camera_s, plan_s
        self.ended: dict[str, list[float]] = {name: [] for name in ("driving", *clients)}

    def run(self, seconds: float, driving_plans_per_goal: int = 1) -> Robot:
        now, frames = 0.0, 0
        for name in self.clients:
            self.schedule.goals.append(job("goal", name))
        while now < seconds:
            while frames * self.camera_s <= now:
                self.schedule.driving = frame(arrival=now)
                frames += 1
            taken = self.schedule.take(driving_plans_per_goal, now)
            if taken is None:
                now = frames * self.camera_s
                continue
            now += self.plan_s if taken.is_driving else self.clients[taken.client]
            self.schedule.end(taken, now)
            self.ended["driving" if taken.is_driving else taken.client].append(now)
            if not taken.is_driving:
                self.schedule.goals.append(job("goal", taken.client, arrival=now))
        return self

    @property
    def longest_gap(self) -> float:
        """Time between the ends of two plans of driving."""
        ends = self.ended["driving"]
        return max(after - before for before, after in pairwise(ends))


@pytest.mark.parametrize("camera_s", [0.03, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("goal_s", [0.02, 0.1, 0.4, 3.0])
@pytest.mark.parametrize("clients", [1, 2, 4])
def test_goals_delay_driving_by_one_goal_and_half_a_gap_at_most(camera_s, goal_s, clients):
    alone = Robot({}, camera_s).run(60.0).longest_gap
    beside = Robot({f"c{index}": goal_s for index in range(clients)}, camera_s).run(60.0).longest_gap
    assert beside <= goal_s + 1.5 * alone


@pytest.mark.parametrize("share", [1, 3])
def test_driving_at_full_rate_leaves_its_share_to_goals(share):
    robot = Robot({"a": 0.15}, camera_s=0.01).run(60.0, share)
    assert len(robot.ended["a"]) == pytest.approx(len(robot.ended["driving"]) / share, abs=1)


def test_a_long_goal_holds_up_driving_by_its_own_time_only():
    robot = Robot({"long": 5.0, "short": 0.1}, camera_s=0.01).run(60.0)
    assert robot.longest_gap == pytest.approx(5.0 + 0.15)


def test_clients_have_as_many_turns_as_each_other():
    robot = Robot(dict.fromkeys("abcd", 0.1))
    robot.schedule.goals += [job("goal", "a") for _ in range(10)]  # a greedy client
    turns = {name: len(ends) for name, ends in robot.run(30.0).ended.items() if name != "driving"}
    assert max(turns.values()) - min(turns.values()) <= 1


def test_a_client_with_many_goals_alternates_with_the_others():
    schedule = Schedule()
    schedule.goals += [job("a1", "a"), job("a2", "a"), job("a3", "a"), job("b1", "b"), job("c1", "c")]
    assert order(schedule) == ["a1", "b1", "c1", "a2", "a3"]


def test_goals_of_unknown_clients_run_in_their_order():
    schedule = Schedule()
    schedule.goals += [job("1"), job("2"), job("3")]
    assert order(schedule) == ["1", "2", "3"]


def test_other_work_keeps_its_place_between_goals():
    schedule = Schedule()
    schedule.goals += [job("a1", "a"), job("a2", "a"), change("loras"), job("b1", "b")]
    assert order(schedule) == ["a1", "a2", "loras", "b1"]


def test_a_command_runs_next_even_after_other_driving():
    schedule = Schedule()
    schedule.goals += [job("1"), job("2")]
    schedule.driving = frame()
    assert run(schedule) == "frame"
    schedule.driving = frame("command", is_command=True)
    assert order(schedule) == ["command", "1", "2"]


def test_commands_without_end_leave_a_share_to_goals():
    schedule = Schedule()
    schedule.goals += [job("goal")]
    taken = Counter()
    for _ in range(COMMANDS_PER_GOAL + 1):
        schedule.driving = frame("command", is_command=True)
        taken[run(schedule)] += 1
    assert taken == {"command": COMMANDS_PER_GOAL, "goal": 1}


def test_a_command_goes_before_a_goal_however_many_plans_ran_before_the_goal_came():
    schedule = Schedule()
    for _ in range(COMMANDS_PER_GOAL + 2):
        schedule.driving = frame()
        run(schedule)
    schedule.goals += [job("goal", "a")]
    schedule.driving = frame("command", is_command=True)
    assert order(schedule) == ["command", "goal"]


def test_goals_of_a_client_that_left_take_no_slot_from_driving():
    schedule = Schedule()
    schedule.goals += [job("dead", "dead")]
    schedule.gone = {"dead"}
    for _ in range(5):
        schedule.driving = frame()
        assert run(schedule) == "frame"
    assert order(schedule) == ["dead"]


def test_goals_of_a_client_that_left_run_when_no_other_waits():
    schedule = Schedule()
    schedule.goals += [job("dead", "dead"), job("a1", "a"), job("a2", "a")]
    schedule.gone = {"dead"}
    assert order(schedule) == ["a1", "a2", "dead"]


def test_other_work_does_not_wait_for_goals_of_a_client_that_left():
    schedule = Schedule()
    schedule.goals += [job("dead", "dead"), change("loras"), job("a1", "a")]
    schedule.gone = {"dead"}
    assert order(schedule) == ["loras", "a1", "dead"]


def test_goals_without_a_name_have_one_turn_together():
    schedule = Schedule()
    schedule.goals += [job("1"), job("2"), job("3"), job("a1", "a"), job("a2", "a")]
    assert order(schedule) == ["1", "a1", "2", "a2", "3"]


@pytest.mark.parametrize(
    ("waiting", "gone", "displaced"),
    [
        ("aaab", "", 2),  # the newest of the client with most
        ("aab", "b", 2),  # of a client that left
        ("ab", "", None),
        ("aacc", "", 1),
        ("", "", None),
    ],
)
def test_a_full_queue_makes_room_for_a_client_with_fewer_goals(waiting, gone, displaced):
    schedule = Schedule()
    schedule.goals += [job(str(index), client) for index, client in enumerate(waiting)]
    schedule.gone = set(gone)
    found = schedule.displaced_by("new")
    assert (found and int(found.request)) == displaced


def test_goals_without_a_name_displace_none_of_a_client_with_fewer():
    schedule = Schedule()
    schedule.goals += [job("1"), job("2"), job("3"), job("a0", "a"), job("a1", "a")]
    assert schedule.displaced_by("") is None


def test_a_full_queue_makes_no_room_for_the_client_that_fills_it():
    schedule = Schedule()
    schedule.goals += [job("1", "a"), job("2", "a"), job("3")]
    assert schedule.displaced_by("a") is None


def test_jobs_that_started_are_counted_by_class():
    schedule = Schedule()
    assert schedule.started == {"driving": 0, "goals": 0}
    schedule.driving = frame()
    schedule.goals += [job("1"), job("2")]
    order(schedule)
    assert schedule.started == {"driving": 1, "goals": 2}
