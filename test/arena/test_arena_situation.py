# SPDX-License-Identifier: Apache-2.0
"""Situations to learn from, and episodes."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from edgellm_arena.driving.expert import CAREFUL, blocking
from edgellm_arena.driving.search import LEFT, RIGHT
from edgellm_arena.episodes.episode import SUCCESS_DISTANCE, TIMEOUT, Outcome, World, make_episode
from edgellm_arena.episodes.scoring import is_true
from edgellm_arena.episodes.situation import FAMILIES, KINDS, sample_situation, sample_situations, situations
from edgellm_arena.world.unicycle import HISTORY, HORIZON, State, rollout
from edgellm_arena.world.visibility import Sight, sights


def same(a, b) -> bool:
    return (a.scene, a.state, a.command, a.answer) == (
        b.scene,
        b.state,
        b.command,
        b.answer,
    ) and np.array_equal(a.history, b.history)


@pytest.mark.slow
def test_situations_follow_from_seed_and_split():
    one, again, other, test = (
        list(islice(situations(seed, split), 5))
        for seed, split in ((1, "train"), (1, "train"), (2, "train"), (1, "test"))
    )
    assert all(map(same, one, again))
    assert not any(map(same, one, other))
    assert not any(map(same, one, test))


@pytest.mark.slow
def test_actions_come_with_drives_and_only_with_them():
    for moment in sample_situations(np.random.default_rng(0), 120):
        assert moment.has_actions == (moment.kind in ("go", "stop"))
        assert (moment.actions is not None) == moment.has_actions
        if moment.actions is not None:
            assert moment.actions.shape == (HORIZON, 2)


@pytest.mark.slow
def test_targets_are_in_view_and_unseen_things_are_searched():
    for moment in sample_situations(np.random.default_rng(1), 60, kind="go"):
        if moment.target is None:
            assert "do not see" in moment.answer
            assert moment.side in (LEFT, RIGHT)
        else:
            assert sights(moment.scene, moment.state)[moment.target] is not Sight.UNSEEN


@pytest.mark.slow
def test_history_ends_here_and_fits_the_speed():
    for moment in sample_situations(np.random.default_rng(2), 120):
        assert moment.history.shape == (HISTORY, 2)
        np.testing.assert_allclose(moment.history[-1], 0, atol=1e-9)
        last = np.hypot(*(moment.history[-1] - moment.history[-2]))
        assert last == pytest.approx(moment.state.speed * 0.1, abs=0.012)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_and_kind_can_be_had(family, kind):
    moment = sample_situation(np.random.default_rng(3), family=family, kind=kind)
    assert (moment.family, moment.kind) == (family, kind)


@pytest.mark.slow
def test_careful_drives_are_slower_and_said_to_be():
    moments = sample_situations(np.random.default_rng(4), 60, kind="go", manner=CAREFUL)
    driving = [m for m in moments if "i drive" in m.answer]
    assert len(driving) > 20
    for moment in driving:
        assert "carefully" in moment.answer
        assert is_true(moment.answer, moment)
        speed = rollout(moment.state, moment.actions)[:, 3]
        assert speed[10:].max() <= CAREFUL.top_speed + 0.02


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="flying"):
        sample_situation(np.random.default_rng(0), family="flying")
    with pytest.raises(ValueError, match="sing"):
        sample_situation(np.random.default_rng(0), kind="sing")
    with pytest.raises(ValueError, match="validation"):
        next(situations(0, "validation"))


@pytest.mark.slow
def test_episodes_follow_from_the_seed_and_can_be_done():
    families = set()
    for seed in range(25):
        episode = make_episode(seed)
        again = make_episode(seed)
        assert (episode.scene, episode.start, episode.command) == (again.scene, again.start, again.command)
        assert episode.start.speed == 0
        assert sights(episode.scene, episode.start)[episode.target] is Sight.SEEN
        distance = episode.scene.solids[episode.target].surface_distance(episode.start.x, episode.start.y)
        assert 1.5 <= distance <= 3.5
        families.add(episode.family)
    assert families == {"random", "dead_ahead"}


@pytest.mark.slow
def test_out_of_sight_episodes_begin_with_the_target_out_of_view():
    starts = [make_episode(seed, "out_of_sight") for seed in range(12)]
    assert all(sights(e.scene, e.start)[e.target] is Sight.UNSEEN for e in starts)
    assert len({e.start.heading for e in starts}) == 12


def test_dead_ahead_episodes_have_something_in_the_way():
    episode = make_episode(3, "dead_ahead")
    first = blocking(episode.scene, episode.start, episode.target)[0]
    assert episode.scene.solids[first].is_obstacle


def world_at(x: float, y: float, speed: float = 0.0, seed: int = 0) -> World:
    world = World(make_episode(seed))
    world.state = State(x, y, 0.0, speed)
    return world


def test_rest_near_the_target_is_success():
    target = make_episode(0).scene.solids[make_episode(0).target]
    x = target.x - target.radius
    assert world_at(x - SUCCESS_DISTANCE + 0.01, target.y).step(0, 0) is Outcome.SUCCESS
    assert world_at(x - SUCCESS_DISTANCE - 0.01, target.y).step(0, 0) is Outcome.RUNNING
    assert world_at(x - SUCCESS_DISTANCE, target.y, speed=0.3).step(0, 0) is Outcome.RUNNING


def test_touching_a_solid_or_a_wall_is_a_collision():
    target = make_episode(0).scene.solids[make_episode(0).target]
    assert world_at(target.x - target.radius - 0.16, target.y, 0.8).step(0, 0) is Outcome.COLLISION
    assert world_at(-20.0, 0.0).step(0, 0) is Outcome.COLLISION


def test_a_robot_that_does_nothing_times_out():
    world = World(make_episode(0))
    while not world.done:
        world.step(0.0, 0.0)
    assert world.outcome is Outcome.TIMEOUT
    assert world.time == pytest.approx(TIMEOUT)
    with pytest.raises(RuntimeError, match="timeout"):
        world.step(0.0, 0.0)


def test_actions_must_be_finite():
    with pytest.raises(ValueError, match="nan"):
        World(make_episode(0)).step(float("nan"), 0.0)


def test_world_history_is_the_way_in_the_base_frame():
    world = World(make_episode(0))
    np.testing.assert_allclose(world.history(), 0, atol=1e-12)
    for _ in range(10):
        world.step(1.0, 0.5)
    history = world.history()
    assert history.shape == (HISTORY, 3)
    np.testing.assert_allclose(history[-1], 0, atol=1e-12)
    assert (np.diff(history[:, 0]) > 0).all()
    assert (history[:-1, 2] < 0).all()  # it has turned left since
