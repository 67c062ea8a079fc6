# SPDX-License-Identifier: Apache-2.0
"""Continuations of a mistaken driver's plan; no PyTorch needed."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from edgellm_arena.driving import expert
from edgellm_arena.driving.search import LEFT, RIGHT, search
from edgellm_arena.episodes.situation import situations, with_margin
from edgellm_arena.world.unicycle import ROBOT_RADIUS, State, rollout
from training.mistakes import FAR, LONGEST, continuations, continued, mistaken_scene

SAME = 0.05  # m: the expert returns one of several routes that differ by less


@pytest.fixture(scope="module")
def made():
    """Situations with their continuations."""
    return list(islice(continued(np.random.default_rng(0), situations(3)), 192))


def test_a_mistaken_driver_sees_the_target_and_misses_other_solids(made):
    rng, missed = np.random.default_rng(0), []
    cases = [s for s, c in made if c is not None and s.target is not None]
    for case in cases:
        believed = mistaken_scene(rng, case.scene, case.target)
        far = [abs(a.x - b.x) > FAR / 2 for a, b in zip(believed.solids, case.scene.solids, strict=True)]
        assert not far.pop(case.target)
        missed += far
    assert 0.3 < np.mean(missed) < 0.5


def test_nearly_each_situation_with_actions_continues_some_rows(made):
    for situation, continuation in made:
        if continuation is not None:
            assert situation.has_actions
            assert 1 <= continuation.given <= LONGEST
            assert continuation.actions.shape == (40, 2)
    drives = [c is not None for s, c in made if s.has_actions]
    assert 0.7 < np.mean(drives) < 1


def test_the_rows_after_the_given_ones_are_an_experts_plan_from_where_they_lead(made):
    for situation, continuation in made:
        if continuation is None or situation.target is None:
            continue
        given = continuation.given
        reached = State(*rollout(situation.state, continuation.actions[:given])[-1])
        routes = expert.routes(situation.scene, reached, situation.target, with_margin(expert.BRISK))
        free = [route.actions for route in routes if not route.collides] or [expert.brake(reached.speed)]
        driven = rollout(reached, continuation.actions[given:])[:, :2]
        ways = [rollout(reached, way[: len(driven) - 1])[:, :2] for way in free]
        assert min(np.abs(way - driven).max() for way in ways) < SAME


def test_a_continuation_collides_with_nothing_in_the_true_scene(made):
    for situation, continuation in made:
        if continuation is not None:
            track = rollout(situation.state, continuation.actions)
            assert min(situation.scene.clearance(x, y) for x, y in track[:, :2]) >= ROBOT_RADIUS - 1e-9


def test_given_rows_often_lead_elsewhere_than_the_experts_own(made):
    """They lead more than 5 cm elsewhere in some of the situations.

    Others have a free way or few given rows.
    """
    apart = []
    for situation, continuation in made:
        if continuation is not None:
            ends = [
                rollout(situation.state, actions[: continuation.given])[-1, :2]
                for actions in (situation.actions, continuation.actions)
            ]
            apart.append(np.hypot(*(ends[0] - ends[1])))
    assert np.mean(np.array(apart) > 0.05) > 0.2


def test_the_expert_stops_a_driver_who_should_stop(made):
    """Also one who drives: words and motion agree."""
    stops = [(s, c) for s, c in made if c is not None and s.kind == "stop"]
    assert len(stops) > 3
    begun = [rollout(s.state, c.actions)[c.given] for s, c in stops]
    assert max(state[3] for state in begun) > 0.3
    for (_, continuation), state in zip(stops, begun, strict=True):
        rest = continuation.actions[continuation.given :]
        np.testing.assert_allclose(rest, expert.brake(state[3])[: len(rest)])
        assert rollout(State(*state), rest)[-1, 3] < 0.01


def test_a_search_goes_on_after_the_given_rows(made):
    searches = [(s, c) for s, c in made if c is not None and s.side is not None]
    assert len(searches) > 3
    for situation, continuation in searches:
        reached = State(*rollout(situation.state, continuation.actions[: continuation.given])[-1])
        rest = continuation.actions[continuation.given :]
        ways = [search(situation.scene, reached, side)[: len(rest)] for side in (LEFT, RIGHT)]
        assert min(np.abs(way - rest).max() for way in ways) < 1e-6


def test_some_given_rows_keep_the_speed_also_at_rest_and_the_expert_changes_it(made):
    kept = [(s, c) for s, c in made if c is not None and not c.actions[: c.given, 0].any()]
    assert 0.2 < len(kept) / sum(c is not None for _, c in made) < 0.5
    assert any(s.state.speed > 0.2 for s, _ in kept)
    starts = [c for s, c in kept if s.state.speed == 0 and s.family == "start" and s.target is not None]
    assert starts
    assert all(c.actions[c.given :, 0].max() > 0.1 for c in starts)


def test_situations_without_actions_have_no_continuation():
    cases = [s for s in islice(situations(3), 96) if not s.has_actions]
    assert cases
    assert continuations(np.random.default_rng(0), cases) == [None] * len(cases)
