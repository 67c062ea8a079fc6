# SPDX-License-Identifier: Apache-2.0
"""Parts of samplings."""

import numpy as np
import pytest

from edgellm_ros.diffusion.sampling import parts_of


@pytest.mark.parametrize(
    ("samples", "steps", "most_steps"), [(1, 10, 20), (3, 7, 20), (17, 23, 20), (64, 4, 2)]
)
def test_parts_have_each_step_of_each_sample_once_and_in_order(samples, steps, most_steps):
    count = np.zeros((samples, steps), int)
    for part in parts_of(samples, steps, 8, most_steps):
        before = count[part.samples.start : part.samples.stop, : part.steps.start]
        assert (before == 1).all()
        count[part.samples.start : part.samples.stop, part.steps.start : part.steps.stop] += 1
    assert (count == 1).all()


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 9, 63, 64])
def test_parts_have_about_the_work_of_a_step_of_the_most_samples(samples):
    parts = parts_of(samples, 10, 8, 20)
    sizes = [len(part.samples) * len(part.steps) for part in parts]
    assert max(sizes) <= 8
    assert len(parts) <= 2 * samples * 10 / 8 + 1


def test_groups_of_samples_have_nearly_equal_sizes():
    assert [len(part.samples) for part in parts_of(20, 1, 8, 20)] == [6, 7, 7]
