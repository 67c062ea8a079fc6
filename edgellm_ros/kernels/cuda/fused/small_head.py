# SPDX-License-Identifier: Apache-2.0
"""Sizes and macros of the kernels for small draft heads, which share `small.cuh`."""

from __future__ import annotations

from edgellm_ros.kernels.cuda.fused.draft import FusedDraftShape
from edgellm_ros.kernels.cuda.fused.plan import WARP

SOURCE = "small.cuh"
THREADS = 256
MOST_ROWS = 8  # of a product on tensor cores
TILE = 16  # columns
TILE_SUMS = 4 * MOST_ROWS * (TILE + 4)  # bytes
GAP = 8  # values after each row of x


def unsupported(shape: FusedDraftShape) -> str | None:
    """Return why no kernel for small heads takes a head; None if one may."""
    for problem, text in (
        (shape.layers != 1, f"the head has {shape.layers} layers"),
        (shape.interleaved, "pairs of rotated values are neighbours"),
        (shape.fp8_cache, "the KV cache has 8 bits"),
    ):
        if problem:
            return text
    return shape.unsupported()


def sums_bytes(k: int, tiles: int) -> int:
    """Return the bytes of the sums of a block's warps.

    The sums are of so many tiles of a product of K rows.
    """
    return TILE_SUMS * tiles * _largest_divisor(k // 16, max(1, THREADS // WARP // tiles))


def macros(shape: FusedDraftShape, cluster: int, **more: int) -> list[tuple[str, str]]:
    """Return names and values of the macros that a kernel is compiled with.

    cluster: blocks that divide the columns of a matrix among them; more: macros of this kernel alone.
    """
    values = {
        "BF16": int(shape.dtype == "bf16"),
        "THREADS": THREADS,
        "TRIGGER_FIRST": 1,
        "CLUSTER": cluster,
        "HIDDEN": shape.hidden,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "ROTARY_DIM": shape.rotary_dim,
        "CAPACITY": shape.capacity,
        "EPSILON": f"{float(shape.epsilon)!r}f",
        "QK_NORM": int(shape.qk_norm),
        "QKV_BIAS": int(shape.qkv_bias),
    }
    return [(name, str(value)) for name, value in (values | more).items()]


def _largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most `most`."""
    return next(each for each in range(most, 0, -1) if number % each == 0)
