# SPDX-License-Identifier: Apache-2.0
"""The expert reaches its target, closed loop, and its plans can be learned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from edgellm_arena.driving import expert
from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.episode import Episode, Outcome, World
from edgellm_arena.episodes.episode import make_episode as make_new_episode
from edgellm_arena.world.scene import Scene, make_solid, random_look
from edgellm_arena.world.unicycle import ACCEL_MAX, ACCEL_MIN, CURVATURE_MAX, V_MAX, State, rollout

make_episode = cache(make_new_episode)  # the tests share episodes, which nothing changes


def drive_with_expert(episode: Episode, seed: int, latency_steps: int) -> World:
    world, rng = World(episode), np.random.default_rng(seed)

    def think(_frame):
        return Plan("", expert.plan(world.scene, world.state, episode.target, rng))

    drive(world, think, latency_steps=latency_steps)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("latency_steps", [0, 3])
def test_closed_loop_reaches_every_target(latency_steps):
    outcomes = [drive_with_expert(make_episode(seed), seed, latency_steps).outcome for seed in range(12)]
    assert outcomes == [Outcome.SUCCESS] * 12


@pytest.mark.slow
def test_dead_ahead_is_passed_left_as_often_as_right():
    episodes = [make_episode(seed, "dead_ahead") for seed in range(25)]
    rng = np.random.default_rng(0)
    drawn = 4 * episodes
    actions = expert.plan_batch(
        [e.scene for e in drawn], [e.start for e in drawn], [e.target for e in drawn], rng
    )
    left = 0
    for episode, plan in zip(drawn, actions, strict=True):
        obstacle = episode.scene.solids[expert.blocking(episode.scene, episode.start, episode.target)[0]]
        states = rollout(episode.start, plan)
        left += states[np.abs(states[:, 0] - obstacle.x).argmin(), 1] > obstacle.y
    assert 35 <= left <= 65


@pytest.mark.slow
def test_each_dead_ahead_scene_is_passed_on_both_sides_though_one_costs_more():
    rng = np.random.default_rng(0)
    for seed in range(10):
        episode = make_episode(seed, "dead_ahead")
        start = replace(episode.start, heading=episode.start.heading + 0.03)
        routes = expert.routes(episode.scene, start, episode.target)
        ends = [expert.choose(routes, rng).states[18, 1] > 0 for _ in range(64)]
        assert 10 <= sum(ends) <= 54


@pytest.mark.slow
def test_a_careful_drive_is_slower_keeps_off_and_arrives():
    brisk, careful = [], []
    for seed in range(12):
        episode = make_episode(seed, "dead_ahead")
        for manner, found in ((expert.BRISK, brisk), (expert.CAREFUL, careful)):
            route = min(
                expert.routes(episode.scene, episode.start, episode.target, manner), key=lambda r: r.cost
            )
            assert route.arrives
            others = [s for i, s in enumerate(episode.scene.solids) if i != episode.target]
            near = min(s.surface_distance(x, y) for s in others for x, y in route.states[:, :2])
            found.append((route.states[:, 3].max(), near))
    (fast, close), (slow, wide) = np.mean(brisk, 0), np.mean(careful, 0)
    assert slow < 0.6 * fast
    assert wide > close + 0.08


@pytest.mark.slow
def test_a_plan_made_again_on_the_way_goes_on_with_the_old_one():
    for seed in range(15):
        episode = make_episode(seed, "dead_ahead")
        rng = np.random.default_rng(seed)
        state, old = episode.start, expert.plan(episode.scene, episode.start, episode.target, rng)
        for _ in range(4):
            state = State(*rollout(state, old[:8])[-1])
            new = expert.plan(episode.scene, state, episode.target, rng)
            np.testing.assert_allclose(new[:32], old[8:], atol=1e-6)
            old = new


@pytest.mark.slow
def test_plans_are_within_limits_and_rest_at_the_target():
    for seed in range(12):
        episode = make_episode(seed)
        route = expert.routes(episode.scene, episode.start, episode.target)[0]
        accel, curvature = route.actions.T
        assert ACCEL_MIN <= accel.min() <= accel.max() <= ACCEL_MAX
        assert np.abs(curvature).max() <= CURVATURE_MAX
        assert route.states[:, 3].max() <= V_MAX
        x, y, _, speed = route.states[-1]
        assert speed == 0
        surface = episode.scene.solids[episode.target].surface_distance(x, y)
        assert surface == pytest.approx(expert.STOP_DISTANCE, abs=0.03)
        np.testing.assert_array_equal(route.actions[-5:], 0)


@pytest.mark.slow
def test_a_batch_of_plans_equals_single_plans():
    episodes = [make_episode(seed) for seed in range(6)]
    batch = expert.routes_batch(*zip(*[(e.scene, e.start, e.target) for e in episodes], strict=True))
    for episode, together in zip(episodes, batch, strict=True):
        alone = expert.routes(episode.scene, episode.start, episode.target)
        assert len(alone) == len(together)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_allclose(a.actions[: expert.HORIZON], b.actions[: expert.HORIZON], atol=1e-9)


@pytest.mark.parametrize("speed", [0.0, 0.03, 0.4, 0.8])
def test_brake_comes_to_rest_and_stays(speed):
    actions = expert.brake(speed)
    states = rollout(State(speed=speed), actions)
    assert states[-1, 3] == pytest.approx(0, abs=1e-12)
    assert (np.diff(states[:, 3]) <= 1e-12).all()
    assert states[-1, 0] < 0.4


def test_without_a_target_the_plan_is_to_brake():
    episode = make_episode(0)
    moving = State(speed=0.6)
    plan = expert.plan(episode.scene, moving, None, np.random.default_rng(0))
    np.testing.assert_array_equal(plan, expert.brake(0.6))


def test_if_every_way_collides_the_plan_is_to_brake():
    rng = np.random.default_rng(0)
    ahead = make_solid(rng, "block", "grey", 0.40, 0.0)
    target = make_solid(rng, "ball", "red", 2.0, 0.0)
    scene = Scene((target, ahead), random_look(rng))
    plan = expert.plan(scene, State(speed=0.8), 0, rng)
    np.testing.assert_array_equal(plan, expert.brake(0.8))


def test_a_target_that_is_not_there_is_refused():
    episode = make_episode(0)
    with pytest.raises(ValueError, match="target 9"):
        expert.plan(episode.scene, State(), 9, np.random.default_rng(0))
