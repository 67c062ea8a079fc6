# SPDX-License-Identifier: Apache-2.0
"""What references are recorded for: the same images and prompts wherever they are made."""

from __future__ import annotations

import numpy as np

IMAGE_TOKEN, VISION_START, VISION_END = 90, 91, 92


def make_image(height: int, width: int) -> np.ndarray:
    """[H, W, 3] uint8: a gradient with noise."""
    rng = np.random.default_rng(height * 10_000 + width)
    count = height * width * 3
    ramp = np.arange(count).reshape(height, width, 3) * 200 // count
    return (ramp + rng.integers(0, 56, (height, width, 3))).astype(np.uint8)


def prompt_ids(texts: list[int], grids: list[tuple[int, int]]) -> list[int]:
    """Token ids of a prompt: runs of text, with images of rows x columns tokens between them."""
    ids = list(range(texts[0]))
    for (rows, columns), length in zip(grids, texts[1:], strict=True):
        ids += [VISION_START, *[IMAGE_TOKEN] * (rows * columns), VISION_END, *range(length)]
    return ids
