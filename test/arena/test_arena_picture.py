# SPDX-License-Identifier: Apache-2.0
"""Driving an episode, and the picture of it."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from edgellm_arena.driving import expert
from edgellm_arena.episodes.closed_loop import Plan, drive
from edgellm_arena.episodes.episode import Outcome, World, make_episode
from edgellm_arena.episodes.picture import draw_episode, overlay, save_episode
from edgellm_arena.world.unicycle import State, rollout


def test_the_path_is_painted_where_it_lies_on_the_floor():
    image = np.full((224, 320, 3), 90, np.uint8)
    path = rollout(State(speed=0.5), np.zeros((40, 2)))
    painted = np.abs(overlay(image, path).astype(int) - image).sum(2) > 30
    rows, columns = np.nonzero(painted)
    assert abs(columns.mean() - 160) < 2
    assert rows.min() > 60
    assert painted[-1, 160]


def test_solids_stay_in_front_of_the_path():
    image = np.full((224, 320, 3), 90, np.uint8)
    floor = np.ones((224, 320), bool)
    floor[:, :170] = False
    painted = overlay(image, rollout(State(speed=0.5), np.zeros((40, 2))), floor=floor)
    np.testing.assert_array_equal(painted[:, :170], image[:, :170])
    assert (painted[:, 170:] != 90).any()


def test_a_robot_at_rest_has_no_path_to_paint():
    image = np.full((224, 320, 3), 90, np.uint8)
    np.testing.assert_array_equal(overlay(image, np.zeros((41, 4))), image)


@pytest.mark.slow
@pytest.mark.parametrize("drives", [True, False])
def test_an_episode_becomes_a_picture(tmp_path, drives):
    episode = make_episode(2, "dead_ahead")
    world, rng = World(episode), np.random.default_rng(0)

    def think(frame):
        assert frame.shape == (224, 320, 3)
        if not drives:
            return Plan("i do not see it. i look around.", None)
        routes = expert.routes(world.scene, world.state, episode.target)
        others = np.stack([r.actions[:40] for r in routes])
        return Plan("i drive. " * 12, expert.choose(routes, rng).actions[:40], others)

    driven = drive(world, think)
    assert world.outcome is (Outcome.SUCCESS if drives else Outcome.TIMEOUT)
    assert driven.clipped == 0
    save_episode(tmp_path / "episode.png", world, driven.plans)
    image = cv2.imread(str(tmp_path / "episode.png"))
    assert image.shape[0] > 800
    assert image.shape[1] > 1400


def test_an_episode_without_a_plan_has_no_picture():
    with pytest.raises(ValueError, match="without a plan"):
        draw_episode(World(make_episode(0)), [])
