# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers, which depend only on a seed and a counter.

Philox4x32-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The generator has
no state, so the same request gives the same tokens and the same noise, whatever ran before and whatever runs
in the same batch.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

MAX_SEED = 2**64 - 1

NOISE_STREAM = 0
TOKEN_STREAM = 1

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_MASK = 0xFFFFFFFF

Word = TypeVar("Word", int, np.ndarray)


def philox4x32(c0: Word, c1: Word, c2: Word, c3: Word, seed: int) -> tuple[Word, Word, Word, Word]:
    """Return four random 32-bit words for a counter of four words and a 64-bit seed.

    The seed's low word is the first key word. Counter words are integers, or uint64 arrays for many counters
    in one call.
    """
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def token_uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) for a token position of the answer.

    The number has 53 random bits.
    """
    high, low, _, _ = philox4x32(position, 0, TOKEN_STREAM, 0, seed)
    return ((high >> 5) * 2**26 + (low >> 6)) * 2.0**-53


def normal_noise(seed: int, samples: int, size: int) -> np.ndarray:
    """Return standard normal numbers, float32 [samples, size].

    Row i depends only on (seed, i). Uses the Box-Muller transform of Philox numbers.
    """
    block, sample = np.meshgrid(
        np.arange(-(-size // 4), dtype=np.uint64), np.arange(samples, dtype=np.uint64)
    )
    stream, zero = np.full_like(block, NOISE_STREAM), np.zeros_like(block)
    words = philox4x32(block, sample, stream, zero, seed)
    columns = []
    for first, second in (words[:2], words[2:]):
        uniform = (first + 1.0) * 2.0**-32  # in (0, 1]: the logarithm is finite
        radius = np.sqrt(-2.0 * np.log(uniform))
        angle = second * (2.0 * np.pi * 2.0**-32)
        columns += [radius * np.cos(angle), radius * np.sin(angle)]
    return np.stack(columns, axis=-1).reshape(samples, -1)[:, :size].astype(np.float32)
