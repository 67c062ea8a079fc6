# SPDX-License-Identifier: Apache-2.0
"""Scenes and their pictures."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from edgellm_arena.world.camera import CAMERA
from edgellm_arena.world.renderer import identify, render
from edgellm_arena.world.scene import (
    COLORS,
    OBSTACLE_SHAPES,
    SHAPES,
    SPACING,
    Scene,
    Solid,
    generate_scene,
    make_solid,
    random_look,
)
from edgellm_arena.world.unicycle import State
from edgellm_arena.world.visibility import Sight, sights


def scene_of(*solids: Solid, seed: int = 0) -> Scene:
    return Scene(solids, random_look(np.random.default_rng(seed)))


def solid(shape: str, color: str, x: float, y: float, seed: int = 0) -> Solid:
    return make_solid(np.random.default_rng(seed), shape, color, x, y)


@pytest.mark.parametrize("family", ["random", "dead_ahead"])
def test_solids_keep_apart_and_have_names_of_their_own(family):
    for seed in range(50):
        solids = generate_scene(np.random.default_rng(seed), family).solids
        assert all(np.hypot(a.x - b.x, a.y - b.y) >= SPACING - 0.03 for a, b in combinations(solids, 2))
        named = [s.name for s in solids if not s.is_obstacle]
        assert len(set(named)) == len(named) >= 1


def test_dead_ahead_puts_an_obstacle_between_the_origin_and_solid_0():
    for seed in range(30):
        scene = generate_scene(np.random.default_rng(seed), "dead_ahead")
        obstacle = next(s for s in scene.solids if s.is_obstacle)
        assert scene.solids[0].y == 0
        assert abs(obstacle.y) < 0.03
        assert 0.9 < obstacle.x < scene.solids[0].x - 0.9


def test_scenes_follow_from_the_generator_state():
    assert generate_scene(np.random.default_rng(4)) == generate_scene(np.random.default_rng(4))
    assert generate_scene(np.random.default_rng(4)) != generate_scene(np.random.default_rng(5))


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="triangle"):
        generate_scene(np.random.default_rng(0), "triangle")
    with pytest.raises(ValueError, match="pyramid"):
        Solid("pyramid", "red", 1, 0, 0.2, 0.3, 0, (1, 0, 0))
    with pytest.raises(ValueError, match="grey"):
        Solid("box", "grey", 1, 0, 0.2, 0.3, 0, (1, 0, 0))


def test_pictures_are_deterministic_but_for_the_sensor():
    scene = generate_scene(np.random.default_rng(1))
    one, again = (render(scene, State(), np.random.default_rng(7)) for _ in range(2))
    other = render(scene, State(), np.random.default_rng(8))
    assert one.shape == (224, 320, 3)
    assert one.dtype == np.uint8
    np.testing.assert_array_equal(one, again)
    assert 0 < np.abs(one.astype(int) - other).mean() < 12


@pytest.mark.parametrize("shape", SHAPES + OBSTACLE_SHAPES)
def test_a_solid_fills_the_pixels_where_projection_puts_it(shape):
    thing = solid(shape, "grey" if shape in OBSTACLE_SHAPES else "red", 1.5, 0.4)
    ids, alone = identify(scene_of(thing), State())
    rows, columns = np.nonzero(ids == 0)
    foot, _ = CAMERA.project(np.array([[1.5, 0.4, 0.0], [1.5, 0.4, thing.height]]))
    assert alone[0] == len(rows) > 300
    assert abs(columns.mean() - foot[:, 0].mean()) < 4
    assert foot[1, 1] - 14 < rows.min() < foot[1, 1] + 6
    assert foot[0, 1] - 2 < rows.max() < foot[0, 1] + 16


@pytest.mark.parametrize("color", COLORS)
def test_paint_is_the_dominant_colour_of_its_pixels(color):
    channel = {"red": [0], "green": [1], "blue": [2], "yellow": [0, 1], "purple": [0, 2]}[color]
    for seed in range(12):
        scene = scene_of(solid("box", color, 1.4, 0.0, seed), seed=seed)
        mean = render(scene, State(), np.random.default_rng(0))[identify(scene, State())[0] == 0].mean(0)
        others = [c for c in range(3) if c not in channel]
        assert mean[channel].min() > mean[others].max()


def test_the_nearer_solid_hides_the_farther():
    near, far = solid("cone", "red", 1.0, 0.0), solid("ball", "blue", 1.7, 0.0)
    for order in ((near, far), (far, near)):
        ids, alone = identify(scene_of(*order), State())
        hidden = order.index(far)
        assert (ids == hidden).sum() < 0.8 * alone[hidden]
        assert (ids == order.index(near)).sum() == alone[order.index(near)]


@pytest.mark.slow
def test_every_place_and_heading_gives_a_picture():
    rng = np.random.default_rng(3)
    for seed in range(40):
        scene = generate_scene(rng)
        pose = State(float(rng.uniform(-2, 6)), float(rng.uniform(-4, 4)), float(rng.uniform(-np.pi, np.pi)))
        image = render(scene, pose, np.random.default_rng(seed))
        assert image.std() > 3


def test_sight_tells_seen_from_hidden_and_from_outside():
    wall = solid("cylinder", "green", 1.0, 0.0)
    tall = Solid("cylinder", "green", 1.0, 0.0, 0.2, 0.6, 0.0, wall.rgb)
    hidden = solid("ball", "red", 2.4, 0.0)
    behind = solid("cone", "blue", -1.5, 0.0)
    aside = solid("box", "purple", 2.0, 1.0)
    assert sights(scene_of(tall, hidden, behind, aside), State()) == [
        Sight.SEEN,
        Sight.UNSEEN,
        Sight.UNSEEN,
        Sight.SEEN,
    ]


def test_alike_solids_share_colour_or_shape_with_the_first():
    for seed in range(40):
        solids = generate_scene(np.random.default_rng(seed), alike=1.0).solids
        first, *others = (s for s in solids if not s.is_obstacle)
        assert all((s.color == first.color) != (s.shape == first.shape) for s in others)
