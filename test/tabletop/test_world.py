# SPDX-License-Identifier: Apache-2.0
"""The arm that picks and places, without and with pictures."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_tabletop.simulation import mujoco
from edgellm_tabletop.units import GRIPPER, JOINTS, to_policy, to_radians
from edgellm_tabletop.world import CLEARANCE, GOALS, LEAST_DISTANCE, REST, Tabletop
from fixtures.rendering import picture_of

RANGE = (-0.17, 1.75)


@pytest.fixture
def world():
    tabletop = Tabletop()
    yield tabletop
    tabletop.close()


def play(world: Tabletop, seed: int, goal: str) -> list[np.ndarray]:
    """Let the controller play an episode; return its joint targets."""
    world.reset(seed, goal)
    targets = []
    while not world.ended:
        targets.append(world.expert_targets())
    return targets


def test_units_are_degrees_and_percent_of_the_grippers_opening():
    values = to_policy(np.array([np.pi, 0, -np.pi / 2, 0, 0, RANGE[0]]), RANGE)
    np.testing.assert_allclose(values, [180, 0, -90, 0, 0, 0], atol=1e-5)
    assert to_policy(np.full(6, RANGE[1]), RANGE)[GRIPPER] == 100


def test_units_are_converted_back():
    values = np.random.default_rng(0).uniform(-90, 90, (5, len(JOINTS)))
    np.testing.assert_allclose(to_policy(to_radians(values, RANGE), RANGE), values, atol=1e-4)


@pytest.mark.parametrize("goal", GOALS)
def test_the_controller_places_the_block_on_the_mark(world, goal):
    for seed in range(3):
        play(world, seed, goal)
        assert world.succeeded
        assert np.hypot(*(world.block[:2] - GOALS[goal])) < 0.03


def test_joint_targets_alone_place_the_block_too(world):
    targets = play(world, 5, "left")
    world.reset(5, "left")
    for each in targets:
        if not world.ended:
            world.step(each)
    assert world.succeeded


def test_a_block_that_is_not_moved_is_not_placed(world):
    world.reset(0, "right")
    while not world.ended:
        world.step(world.state)
    assert not world.succeeded


def test_an_episode_is_that_of_its_seed(world):
    world.reset(7, "left")
    block = world.block
    world.reset(8, "left")
    assert not np.array_equal(world.block, block)
    world.reset(7, "left")
    np.testing.assert_array_equal(world.block, block)


def test_the_block_begins_away_from_the_mark(world):
    for seed in range(20):
        world.reset(seed, "right")
        assert np.hypot(*(world.block[:2] - GOALS["right"])) >= LEAST_DISTANCE


def test_targets_under_noise_are_those_without(world):
    """The noise moves the arm, not what the controller wants."""
    world.reset(3, "left")
    clean = world.expert_targets()
    world.reset(3, "left")
    noisy = world.expert_targets(np.array([0.5, -0.5, 0.5]))
    np.testing.assert_allclose(noisy, clean, atol=1e-4)
    reached = world.state
    world.reset(3, "left")
    world.expert_targets()
    assert np.abs(world.state - reached).max() > 0.1


def test_the_controller_keeps_the_clearance_of_the_fixed_jaw(world):
    world.reset(6, "left")
    while world.gripper[2] > 0.037:
        world.expert_targets()
    assert world.block[1] - world.gripper[1] == pytest.approx(CLEARANCE, abs=0.004)


def test_a_gripper_above_the_block_does_not_grasp_it_and_one_around_it_does(world):
    world.reset(6, "left")
    pose = world.pose
    assert not world.grasps()
    np.testing.assert_array_equal(world.pose, pose)
    while world.gripper[2] > 0.037:
        world.expert_targets()
    assert world.grasps()


def test_a_restarted_episode_has_all_its_steps_and_needs_the_block_carried_again(world):
    play(world, 6, "left")
    assert world.succeeded
    world.restart()
    assert (world.steps, world.succeeded, world.ended) == (0, False, False)
    for _ in range(10):
        world.step(world.state)
    assert not world.succeeded


def test_noise_does_not_move_a_gripper_that_closes(world):
    """Which would lose the block: the controller does not correct it then."""
    ends = []
    for noise in (None, np.array([1.0, 1.0, 0.0])):
        world.reset(3, "left")
        while world.expert_targets()[GRIPPER] > 0:
            pass
        for _ in range(5):
            world.expert_targets(noise)
        ends.append(world.pose)
    np.testing.assert_array_equal(*ends)


def test_an_episode_that_has_ended_does_not_go_on(world):
    play(world, 0, "left")
    with pytest.raises(RuntimeError, match="the episode has ended: call reset"):
        world.step(world.state)


def test_an_unknown_goal_is_refused(world):
    with pytest.raises(ValueError, match="goal must be one of left, right, got 'middle'"):
        world.reset(0, "middle")


def test_without_opengl_a_picture_says_what_to_install(world, monkeypatch):
    def fails(*_) -> None:
        raise mujoco.FatalError("no library\nwas loaded")

    monkeypatch.setattr(mujoco, "Renderer", fails)
    with pytest.raises(OSError, match=r"no OpenGL for pictures \(no library was loaded\): install libegl1"):
        world.image()


def test_the_picture_shows_the_mark_on_its_side(world):
    columns = {}
    for goal in GOALS:
        world.reset(1, goal)
        red, green, blue = picture_of(world).astype(int).transpose(2, 0, 1)
        columns[goal] = np.nonzero((green > red + 60) & (green > blue + 40))[1].mean()
    # The camera looks at the arm: what is on its left is on the right.
    assert columns["left"] > 70
    assert columns["right"] < 58


def test_the_arm_begins_at_rest_with_targets_near_to_it(world):
    """What edgellm_arm asks of the first row of a chunk."""
    for seed in range(10):
        world.reset(seed, list(GOALS)[seed % 2])
        np.testing.assert_array_equal(world.positions, REST)
        away = np.radians(world.expert_targets() - to_policy(np.array(REST), RANGE))
        assert np.abs(away[:GRIPPER]).max() < 0.5


def test_a_step_may_have_parts(world):
    world.reset(2, "left")
    target = np.array(REST) + 0.1
    for _ in range(5):
        world.move(target, 0.02)
    world.judge()
    in_parts = world.positions.copy()
    world.reset(2, "left")
    world.step(to_policy(target, (-0.17453, 1.74533)))
    np.testing.assert_allclose(world.positions, in_parts, atol=1e-6)
    assert world.steps == 1


def test_a_chunk_of_the_expert_moves_nothing_and_places_the_block(world):
    world.reset(4, "right")
    pose = world.pose
    rows = world.expert_chunk(80)
    np.testing.assert_array_equal(world.pose, pose)
    before = np.array(REST)
    for row in rows:
        if world.ended:
            break
        world.watch()
        after = to_radians(row, (-0.17453, 1.74533))
        for part in np.arange(1, 11) / 10:
            world.move(before + part * np.clip(after - before, -0.3, 0.3), 0.01)
        before = before + np.clip(after - before, -0.3, 0.3)
        world.judge()
    assert world.succeeded


def test_chunks_of_the_expert_continue_each_other(world):
    """The controller knows how far its chunk was executed."""
    world.reset(4, "right")
    long = world.expert_chunk(30)
    before = np.array(REST)
    for row in long[:20]:
        world.watch()
        way = np.clip(to_radians(row, (-0.17453, 1.74533)) - before, -0.3, 0.3)
        for part in np.arange(1, 11) / 10:
            world.move(before + part * way, 0.01)
        before = before + way
        world.judge()
    np.testing.assert_allclose(world.expert_chunk(10), long[20:], atol=0.05)
