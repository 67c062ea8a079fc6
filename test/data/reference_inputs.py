# SPDX-License-Identifier: Apache-2.0
"""What references are recorded for: the same images and prompts wherever they are made."""

from __future__ import annotations

import numpy as np

IMAGE_TOKEN, VISION_START, VISION_END = 90, 91, 92
BANDS, FRAMES = slice(3, None, 9), slice(0, None, 11)  # the part of a sound's features that is recorded


def make_image(height: int, width: int) -> np.ndarray:
    """[H, W, 3] uint8: a gradient with noise."""
    rng = np.random.default_rng(height * 10_000 + width)
    count = height * width * 3
    ramp = np.arange(count).reshape(height, width, 3) * 200 // count
    return (ramp + rng.integers(0, 56, (height, width, 3))).astype(np.uint8)


def make_sound(seconds: float, sample_rate: int, loudness: float = 0.5) -> np.ndarray:
    """[N] float32: three voices of rising pitch over soft noise, and a click."""
    count = round(seconds * sample_rate)
    rng = np.random.default_rng(count)
    time = np.arange(count) / sample_rate
    samples = 0.01 * rng.standard_normal(count)
    for pitch in (110.0, 310.0, 1250.0):
        samples += np.sin(2 * np.pi * pitch * time * (1 + 0.1 * time)) * np.sin(3 * time + pitch) ** 2 / 3
    samples[count // 3] += 1
    return (loudness * samples).astype(np.float32)


def prompt_ids(texts: list[int], grids: list[tuple[int, int]]) -> list[int]:
    """Token ids of a prompt: runs of text, with images of rows x columns tokens between them."""
    ids = list(range(texts[0]))
    for (rows, columns), length in zip(grids, texts[1:], strict=True):
        ids += [VISION_START, *[IMAGE_TOKEN] * (rows * columns), VISION_END, *range(length)]
    return ids
