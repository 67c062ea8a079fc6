# SPDX-License-Identifier: Apache-2.0
"""Demonstrations of picking and placing, as rows for training."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_tabletop.world import Tabletop
from fixtures.rendering import picture_of
from training.arm.demonstrations import CHUNK_SIZE, DEMONSTRATION_FIELDS, Moment, demonstrate, write_row
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


@pytest.mark.slow
def test_a_demonstration_ends_with_the_block_on_the_mark():
    world = Tabletop()
    picture_of(world)
    made = demonstrate(world, np.random.default_rng(0), 12, "left")
    assert world.succeeded
    assert len(made) == world.steps
    assert not np.array_equal(made[0].image, made[-1].image)
    world.close()
