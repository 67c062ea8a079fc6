# SPDX-License-Identifier: Apache-2.0
"""Episodes in process: delays, the record, the summary and the picture."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from edgellm_tabletop.episodes.closed_loop import delay_in_steps, goal_of, play
from edgellm_tabletop.episodes.controller import NANOSECONDS
from edgellm_tabletop.episodes.drivers import (
    DATASET,
    ArmInProcess,
    ExpertDriver,
    PolicyDriver,
    Seen,
    contract,
    policy_state,
)
from edgellm_tabletop.episodes.picture import draw_episode
from edgellm_tabletop.episodes.robot import Plan, Robot
from edgellm_tabletop.episodes.summary import describe, summarise, table, times_of
from edgellm_tabletop.units import JOINTS, NAMES
from edgellm_tabletop.world import GOALS, IMAGE_SIZE, STEP_S, Tabletop
from fixtures.rendering import picture_of

START = 10 * NANOSECONDS
SEED = 900_001


@pytest.fixture(scope="module")
def world():
    tabletop = Tabletop()
    yield tabletop
    tabletop.close()


def expert_episode(world: Tabletop, delay: float = 0.0) -> tuple[Robot, str]:
    robot = Robot(world, START)
    robot.reset(SEED, goal_of(SEED))
    driver = ExpertDriver(robot, ArmInProcess(robot, delay))
    return robot, play(robot, driver, delay_in_steps(delay))


class SteadyDriver:
    """Stays where the arm is, and records when it looked and answered."""

    def __init__(self, robot: Robot, moves: bool) -> None:
        self.robot, self.moves = robot, moves
        self.looks: list[int] = []
        self.answers: list[int] = []

    def look(self) -> None:
        self.looks.append(self.robot.world.steps)

    def answer(self, seen: None) -> Plan:
        self.answers.append(self.robot.world.steps)
        if self.moves:  # a trajectory of 3 s
            now, position = self.robot.now, self.robot.controller.at(self.robot.now)[0]
            self.robot.controller.follow(now, [now, now + 3 * NANOSECONDS], [position] * 2, np.zeros((2, 6)))
        return Plan(np.zeros((1, 6), np.float32), 0.0)

    def on_tick(self) -> None:
        pass


@pytest.mark.parametrize(
    ("delay", "moves", "looks", "answers"),
    [
        (0, True, [0, 10, 20], [0, 10, 20]),
        (4, True, [4, 8, 12], [4, 12, 16]),  # at first the arm stands: its frame is taken after the delay
        (13, True, [13, 26, 39], [13, 39, 52]),
        (4, False, [4, 12, 20], [4, 12, 20]),
    ],
)
def test_frames_are_taken_when_a_chunk_is_there_or_every_second_without_a_delay(
    world, delay, moves, looks, answers
):
    robot = Robot(world, START)
    robot.reset(SEED, "left")
    driver = SteadyDriver(robot, moves)
    assert play(robot, driver, delay) == "timeout"
    assert (driver.looks[:3], driver.answers[:3]) == (looks, answers)


def test_frames_at_rest_are_taken_once_the_arm_stands(world):
    robot = Robot(world, START)
    robot.reset(SEED, "left")
    driver = SteadyDriver(robot, moves=True)
    play(robot, driver, 4, at_rest=True)
    rests = [4, 38, 72]  # 3 s of motion, 0.4 s of delay
    assert (driver.looks[:3], driver.answers[:3]) == (rests, rests)


@pytest.mark.parametrize(("goal", "other"), [("left", "right"), ("right", "left")])
def test_the_instruction_of_a_policy_names_the_mark_of_its_episode(world, goal, other):
    robot = Robot(world, START)
    robot.reset(SEED, goal)
    prompts = []

    def handle_request(request) -> SimpleNamespace:
        prompts.append(request.prompt)
        return SimpleNamespace(actions=np.tile(request.state, (1, 10, 1)))

    space = SimpleNamespace(names=NAMES, dt=STEP_S)
    config = SimpleNamespace(policy=SimpleNamespace(action_space=space))
    runtime = SimpleNamespace(config=config, handle_request=handle_request)
    image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    driver = PolicyDriver(robot, ArmInProcess(robot), runtime, seed=0)
    assert driver.answer(Seen(robot.now, image, policy_state(robot))).refused == ""
    assert goal in prompts[0]
    assert other not in prompts[0]


def test_a_delay_below_0_is_refused(world):
    with pytest.raises(ValueError, match="expected delay_steps >= 0 and replan_steps >= 1, got -1 and 10"):
        play(Robot(world, START), None, -1)


@pytest.mark.slow
def test_an_episode_is_the_same_every_time_and_places_the_block_within_the_limits(world):
    reports = []
    for _ in range(2):
        robot, outcome = expert_episode(world)
        reports.append(describe(robot, SEED, outcome))
    assert reports[0] == reports[1]
    report = reports[0]
    assert (report["outcome"], report["refused"], report["violations"]) == ("placed", {}, 0)
    assert 0.5 < report["largest_speed"] <= 1 + 1e-6
    json.dumps(report)
    picture_of(world)
    robot.record.moments = robot.record.moments[:2]  # two key moments: rendering takes long
    picture = draw_episode(robot, SEED, outcome)
    assert min(picture.shape[:2]) > 800
    assert picture.std() > 30


@pytest.mark.slow
def test_chunks_that_are_0_8_s_late_place_the_block_too(world):
    robot, outcome = expert_episode(world, 0.8)
    report = describe(robot, SEED, outcome)
    assert (outcome, report["refused"], report["violations"]) == ("placed", {}, 0)
    assert robot.record.plans[1][0] > robot.record.plans[0][0]


def test_a_chunk_that_begins_far_away_is_refused_and_nothing_moves(world):
    robot = Robot(world, START)
    robot.reset(SEED, "left")
    arm = ArmInProcess(robot)
    before = robot.controller.at(robot.now)[0]
    far = np.tile(policy_state(robot) + 40 * np.eye(6)[0], (20, 1)).astype(np.float32)
    assert arm.follow(robot.now, 1, far, 0.1) == "too_far"
    for _ in range(10):
        robot.tick()
    np.testing.assert_array_equal(robot.controller.at(robot.now)[0], before)


def test_the_contract_and_the_data_set_have_the_worlds_joints():
    assert contract().ros_names == JOINTS
    assert contract().policy_names == NAMES
    info = json.loads((DATASET / "info.json").read_text())
    assert info["fps"] == 10
    for key in ("action", "observation.state"):
        assert tuple(info["features"][key]["names"]) == NAMES


def row(**changes) -> dict:
    return {
        "seed": 1, "goal": "left", "outcome": "placed", "time": 5.0, "plans": 5, "refused": {},
        "from_mark": 0.002, "largest_speed": 0.5, "largest_acceleration": 0.9, "largest_position": 0.7,
        "largest_jerk": 0.8,
        "violations": 0, **changes,
    }  # fmt: skip


def test_the_summary_counts_outcomes_refusals_and_limits():
    rows = [
        row(),
        row(seed=2, goal="right", outcome="timeout", refused={"too_far": 3}, largest_speed=1.0),
        row(seed=3, outcome="lost", violations=4, refused={"too_far": 1, "stopped": 2}),
    ]
    summary = summarise(rows)
    assert (summary["successes"]["count"], summary["timeouts"], summary["lost"]) == (1, 1, 1)
    assert summary["by_goal"]["right"]["of"] == 1
    assert summary["refused"] == {"too_far": 4, "stopped": 2}
    assert (summary["largest_speed"], summary["violations"]) == (1.0, 4)
    assert [each["seed"] for each in summary["not_placed"]] == [2, 3]
    measured = times_of([{"plan_seconds": [0.02, 0.04], "node_seconds": []}])
    assert measured["node_s"] is None
    text = table({**summary, "measured": measured})
    for words in ("placed          1 of 3", "refused by edgellm_arm: 4 too_far, 2 stopped", "100.0% of the"):
        assert words in text
    assert "seeds not placed: 2, 3" in text


def test_goals_alternate_with_the_seeds():
    assert set(map(goal_of, range(2))) == set(GOALS)
    assert goal_of(SEED) == goal_of(SEED + 2)
