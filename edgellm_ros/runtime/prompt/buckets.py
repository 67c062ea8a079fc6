# SPDX-License-Identifier: Apache-2.0
"""Buckets of prompt lengths: on a GPU a new length is as fast as a known one.

On a GPU a length that was not seen before is slow: libraries choose a kernel for every new shape of a
product, and the run is not recorded. So a prompt is computed with padding at its end, as many tokens as the
next bucket has. The padding leaves no trace: queries before it do not attend to it, its KV rows are behind
the committed ones, and recurrent layers stop at the prompt's own last token.
"""

from __future__ import annotations

from edgellm_ros.engine.device import Device

SMALLEST = 16  # tokens; the step between small buckets, too
PER_OCTAVE = 8  # so that at most an eighth of a longer run is padding


def pads_prompts(device: Device) -> bool:
    """Return whether prompts are padded on a device: on a GPU, which has graphs."""
    return device.has_graphs


def bucket_of(tokens: int) -> int:
    """Return the smallest bucket that has room for so many tokens, at least 1."""
    step = max(SMALLEST, (1 << (tokens - 1).bit_length()) // 2 // PER_OCTAVE)
    return -(-tokens // step) * step


def buckets(most: int) -> list[int]:
    """Return all buckets up to a length, which is the last one."""
    sizes, size = [], 0
    while size < most:
        size = min(bucket_of(size + 1), most)
        sizes.append(size)
    return sizes
