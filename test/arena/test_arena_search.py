# SPDX-License-Identifier: Apache-2.0
"""Turning to find a solid that is out of sight."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.driving import expert
from edgellm_arena.driving.search import LEFT, RIGHT, collides, search, search_side, turning_side
from edgellm_arena.episodes.episode import Outcome, World, make_episode
from edgellm_arena.world.scene import Scene, generate_scene, make_solid
from edgellm_arena.world.unicycle import CURVATURE_MAX, HISTORY, State, advance, rollout, to_base
from edgellm_arena.world.visibility import Sight, sights

HALL = generate_scene(np.random.default_rng(0)).look


def scene_with(*places: tuple[float, float]) -> Scene:
    """Return a scene with boxes at these places."""
    rng = np.random.default_rng(0)
    return Scene(tuple(make_solid(rng, "box", "red", x, y) for x, y in places), HALL)


def past(curvature: float, speed: float = 0.3) -> np.ndarray:
    """Return the history of a robot that drives a circle."""
    track = [State(speed=speed).array()]
    for _ in range(HISTORY - 1):
        track.append(advance(track[-1], 0.0, curvature))
    return to_base(State(*track[-1]), np.stack(track)[:, :2])


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_in_free_space_the_robot_drives_the_tightest_circle(side):
    actions = search(scene_with((4.0, 3.0)), State(), side)
    np.testing.assert_allclose(actions[:, 1], side * CURVATURE_MAX)
    headings = rollout(State(), actions)[:, 2]
    assert abs(headings[-1]) > np.deg2rad(120)


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_a_search_keeps_clear_of_a_solid_on_its_circle(side):
    scene = scene_with((0.25, side * 0.85))
    assert collides(scene, State(), np.tile([0.9, side * CURVATURE_MAX], (40, 1)))
    actions = search(scene, State(), side)
    assert not collides(scene, State(), actions)
    assert rollout(State(), actions)[-1, 3] > 0.2


def test_a_robot_that_cannot_move_stays():
    wall = scene_with(*((0.5, y) for y in np.arange(-0.8, 0.9, 0.2)))
    np.testing.assert_array_equal(search(wall, State(), LEFT), expert.brake(0.0))


def test_careful_searches_are_slower():
    brisk, careful = (
        rollout(State(), search(scene_with((4.0, 3.0)), State(), LEFT, manner))[-1, 3]
        for manner in (expert.BRISK, expert.CAREFUL)
    )
    assert careful < 0.6 * brisk


@pytest.mark.parametrize(
    "history, side",
    [
        (past(2.5), LEFT),
        (past(-2.5), RIGHT),
        (past(2.5, speed=0.1), LEFT),
        (past(0.0), None),
        (past(0.6), None),
        (np.zeros((HISTORY, 2)), None),
    ],
)
def test_a_robot_turns_if_its_last_positions_lie_on_a_small_circle(history, side):
    assert turning_side(history) == side


def test_a_robot_that_turns_goes_on_to_the_same_side():
    assert search_side(past(-2.5), 90.0, np.random.default_rng(0)) == RIGHT


def test_a_robot_that_does_not_turn_turns_to_the_side_of_the_solid():
    rest = np.zeros((HISTORY, 2))
    assert search_side(rest, 90.0, np.random.default_rng(0)) == LEFT
    assert search_side(rest, -90.0, np.random.default_rng(0)) == RIGHT


def test_a_solid_that_is_not_there_is_searched_on_either_side():
    rng = np.random.default_rng(0)
    sides = [search_side(np.zeros((HISTORY, 2)), None, rng) for _ in range(40)]
    assert 8 < sides.count(LEFT) < 32


@pytest.mark.slow
@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_the_expert_finds_and_reaches_targets_that_are_out_of_sight(side):
    """The search is planned every 0.8 s, and keeps its side by the history alone."""
    for seed in range(6):
        episode = make_episode(seed, "out_of_sight", "train")
        world, rng = World(episode), np.random.default_rng(seed)
        while not world.done:
            scene, state = world.scene, world.state
            if sights(scene, state)[episode.target] is Sight.UNSEEN:
                actions = search(scene, state, turning_side(world.history()[:, :2]) or side)
            else:
                actions = expert.plan(scene, state, episode.target, rng)
            for action in actions[:8]:
                if not world.done:
                    world.step(*action)
        assert world.outcome is Outcome.SUCCESS, seed
