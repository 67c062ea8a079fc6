# SPDX-License-Identifier: Apache-2.0
"""Sizes and macros of the kernels for small draft heads, which share `small.cuh`."""

from __future__ import annotations

from edgellm_ros.fused.plan.launch import WARP
from edgellm_ros.fused.plan.shape import FusedDraftShape

THREADS = 256
MOST_ROWS = 8  # of x: operand B of mma.m16n8k16
TILE = 16  # columns
TILE_SUMS = 4 * MOST_ROWS * (TILE + 4)  # bytes of a tile's accumulators
GAP = 8  # values of padding after each row of x


def unsupported(shape: FusedDraftShape) -> str | None:
    """Return why the kernels for small heads do not take a head; None if they may."""
    others = shape.differing("epsilon")
    for problem, text in (
        (shape.layers != 1, f"the head has {shape.layers} layers"),
        (not shape.joined, "the head has a projection"),
        (bool(others), f"the kernels lack {', '.join(others)}"),
        (shape.fp8_cache, "the KV cache has 8 bits"),
    ):
        if problem:
            return text
    return shape.unsupported()


def sums_bytes(k: int, tiles: int) -> int:
    """Return the bytes of the accumulators of a CTA's warps.

    k: rows of the matrix; tiles: tiles of its columns that the CTA has.
    """
    return TILE_SUMS * tiles * _largest_divisor(k // 16, max(1, THREADS // WARP // tiles))


def macros(shape: FusedDraftShape, cluster: int, **more: int) -> list[tuple[str, str]]:
    """Return names and values of the macros that a kernel is compiled with.

    cluster: CTAs over which the columns of a matrix are distributed; more: macros of this kernel alone.
    """
    values = {
        "BF16": int(shape.dtype == "bf16"),
        "THREADS": THREADS,
        "PDL_TRIGGER_FIRST": 1,
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
