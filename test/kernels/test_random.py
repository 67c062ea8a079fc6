# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.kernels.random import MAX_SEED, normal_noise, philox4x32, token_uniform

# kat_vectors of Random123 (D. E. Shaw Research): counter, key, result
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    seed = key[0] | key[1] << 32
    assert philox4x32(*counter, seed) == expected
    arrays = philox4x32(*(np.array([word, word], np.uint64) for word in counter), seed)
    assert [tuple(row) for row in np.stack(arrays, axis=-1).tolist()] == [expected, expected]


def test_token_numbers_are_uniform_and_depend_on_seed_and_step():
    numbers = np.array([[token_uniform(seed, step) for step in range(50)] for seed in range(50)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert counts.min() > 190  # 250 expected, standard deviation 15
    assert token_uniform(MAX_SEED, 0) != token_uniform(MAX_SEED - 1, 0)


def test_noise_is_standard_normal():
    noise = normal_noise(seed=1, samples=100, size=1000)
    assert noise.dtype == np.float32
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert abs((np.abs(noise) < 1).mean() - 0.6827) < 0.005
    assert abs(np.corrcoef(noise[:, ::2].ravel(), noise[:, 1::2].ravel())[0, 1]) < 0.02


def test_noise_of_a_sample_depends_on_the_seed_and_its_number_only():
    noise = normal_noise(seed=7, samples=5, size=81)
    np.testing.assert_array_equal(noise[:2], normal_noise(seed=7, samples=2, size=81))
    np.testing.assert_array_equal(noise[:, :40], normal_noise(seed=7, samples=5, size=40))
    assert not np.isin(noise[0], noise[1]).any()
    assert not np.isin(noise, normal_noise(seed=8, samples=5, size=81)).any()
