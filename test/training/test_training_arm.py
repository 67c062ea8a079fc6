# SPDX-License-Identifier: Apache-2.0
"""Demonstrations of picking and placing, as rows for training."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_tabletop.simulation import HOVER_HEIGHT
from edgellm_tabletop.units import GRIPPER
from edgellm_tabletop.world import GOALS, MARK_RADIUS, Tabletop
from fixtures.rendering import picture_of
from training.arm import demonstrations
from training.arm.demonstrations import (
    CHUNK_SIZE,
    DEMONSTRATION_FIELDS,
    MISS_SHARE,
    Moment,
    demonstrate,
    draw_miss,
    write_row,
)
from training.arm.misses import MISSES, miss
from training.stream import new_chunk


def moments(count: int) -> list[Moment]:
    image = np.zeros(DEMONSTRATION_FIELDS["image"][0], np.uint8)
    return [Moment(image, np.full(6, i, np.float32), np.full(6, 100 + i, np.float32)) for i in range(count)]


def test_a_row_has_the_actions_from_its_moment_on():
    chunk = new_chunk(DEMONSTRATION_FIELDS, 2)
    write_row(chunk, 1, moments(CHUNK_SIZE + 10), 4)
    np.testing.assert_array_equal(chunk["action"][1, :, 0], 104 + np.arange(CHUNK_SIZE))
    np.testing.assert_array_equal(chunk["state"][1], np.full(6, 4))
    assert not chunk["is_pad"][1].any()


def test_actions_after_the_end_are_padding():
    chunk = new_chunk(DEMONSTRATION_FIELDS, 1)
    write_row(chunk, 0, moments(10), 7)
    assert chunk["is_pad"][0].tolist() == [False] * 3 + [True] * (CHUNK_SIZE - 3)
    assert chunk["action"][0, :, 0].tolist() == [107, 108] + [109] * (CHUNK_SIZE - 2)


@pytest.fixture
def blind(monkeypatch) -> Tabletop:
    """A world without pictures."""
    image = np.zeros(DEMONSTRATION_FIELDS["image"][0], np.uint8)
    monkeypatch.setattr(Tabletop, "image", lambda self: image)
    return Tabletop()


def missed(world: Tabletop, kind: str, seed: int) -> None:
    """Bring a miss about; the draws that are none are few."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        world.reset(seed, list(GOALS)[seed % 2])
        if miss(world, rng, kind):
            return
    raise AssertionError(f"no miss of the kind {kind} in 20 draws")


@pytest.mark.parametrize("kind", MISSES)
def test_after_a_miss_the_gripper_is_empty_and_the_block_lies_beside_the_mark(blind, kind):
    for seed in range(2):
        missed(blind, kind, seed)
        assert not blind.grasps()
        assert blind.block[2] < 0.021
        assert np.hypot(*(blind.block[:2] - GOALS[blind.goal])) > MARK_RADIUS
        assert (blind.steps, blind.ended) == (0, False)


@pytest.mark.parametrize("kind", MISSES)
def test_a_miss_is_not_recorded_and_the_block_is_placed(blind, kind, monkeypatch):
    monkeypatch.setattr(demonstrations, "draw_miss", lambda rng: kind)
    made = demonstrate(blind, np.random.default_rng(1), 3, "right")
    assert blind.succeeded
    assert len(made) == blind.steps
    blind.reset(3, "right")
    assert np.abs(made[0].state - blind.state).max() > 5


def test_another_attempt_opens_the_gripper_and_rises_before_it_moves_sideways(blind):
    missed(blind, "pushed", 4)
    low, block = blind.gripper, blind.block
    assert low[2] < block[2] + HOVER_HEIGHT - 0.02
    while blind.gripper[2] < block[2] + HOVER_HEIGHT - 0.015:
        assert blind.expert_targets()[GRIPPER] == 100
        assert np.hypot(*(blind.gripper[:2] - low[:2])) < 0.01


def test_episodes_begin_with_a_miss_of_each_kind_as_often_as_told():
    rng = np.random.default_rng(0)
    drawn = [draw_miss(rng) for _ in range(4000)]
    assert 1 - drawn.count(None) / len(drawn) == pytest.approx(MISS_SHARE, abs=0.02)
    for kind in MISSES:
        assert drawn.count(kind) / len(drawn) == pytest.approx(MISS_SHARE / len(MISSES), abs=0.015)


def test_a_demonstration_after_a_miss_is_that_of_its_seed(blind, monkeypatch):
    monkeypatch.setattr(demonstrations, "draw_miss", lambda rng: "beside")
    once, again, other = (demonstrate(blind, np.random.default_rng(seed), 8, "left") for seed in (5, 5, 7))
    for name in ("state", "targets"):
        values = [np.stack([getattr(moment, name) for moment in made]) for made in (once, again, other)]
        np.testing.assert_array_equal(values[0], values[1])
        assert not np.array_equal(values[0][0], values[2][0])


def test_if_no_miss_can_be_mended_there_is_no_demonstration(blind, monkeypatch):
    monkeypatch.setattr(demonstrations, "draw_miss", lambda rng: "beside")
    monkeypatch.setattr(demonstrations, "miss", lambda *_: False)
    assert demonstrate(blind, np.random.default_rng(0), 0, "left") == []


@pytest.mark.slow
def test_a_demonstration_ends_with_the_block_on_the_mark():
    world = Tabletop()
    picture_of(world)
    made = demonstrate(world, np.random.default_rng(0), 12, "left")
    assert world.succeeded
    assert len(made) == world.steps
    assert not np.array_equal(made[0].image, made[-1].image)
    world.close()
