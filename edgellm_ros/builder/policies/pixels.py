# SPDX-License-Identifier: Apache-2.0
"""Pixels of cameras in a policy's graph: normalised, resized and cut."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.observations import ImageSpace


def normalised(graph: ModelBuilder, pixels: ir.Value, image: ImageSpace) -> ir.Value:
    """Add the normalisation of images: [N,H,W,3] uint8, or [H,W,3], to [N,3,H,W].

    Computed in fp32.
    """
    with graph.scope("pixels"):
        x = graph.op("Cast", pixels, to=int(FLOAT))
        if pixels.shape is not None and len(pixels.shape) == 3:
            x = graph.op("Unsqueeze", x, graph.constant([0]))
        x = graph.transpose(x, (0, 3, 1, 2))
        scale, offset = (
            graph.constant(np.reshape(values, (1, 3, 1, 1)), FLOAT) for values in (image.scale, image.offset)
        )
        return graph.from_fp32(graph.op("Add", graph.op("Mul", x, scale), offset))


# x [N,C,H,W] -- MatMul (rows [h,H] before it) -- MatMul (columns [W,w] after it) -->
def resized(graph: ModelBuilder, x: ir.Value, before: tuple[int, int], after: tuple[int, int]) -> ir.Value:
    """Add a resizing of images [N,C,*before] to [N,C,*after].

    Sizes are (height, width). It is bilinear and filters what is made smaller, as that of PyTorch. The Resize
    of TensorRT has no such filter.
    """
    (height, width), (new_height, new_width) = before, after
    with graph.scope("resize"):
        if height != new_height:
            rows = graph.weight("resize_rows", (new_height, height), lambda: filters(height, new_height))
            x = graph.op("MatMul", rows, x)
        if width != new_width:
            columns = graph.weight("resize_columns", (width, new_width), lambda: filters(width, new_width).T)
            x = graph.op("MatMul", x, columns)
    return x


def filters(size: int, new_size: int) -> np.ndarray:
    """Compute the weights [new_size, size] fp32 of a line's pixels in the new ones.

    Source: PyTorch 2.13, aten/src/ATen/native/cpu/UpSampleKernel.cpp (bilinear, antialias).
    """
    scale = size / new_size
    support = max(scale, 1.0)
    weights = np.zeros((new_size, size))
    for i in range(new_size):
        centre = scale * (i + 0.5)
        first, end = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), size)
        distances = (np.arange(first, end) - centre + 0.5) / support
        values = np.maximum(1 - np.abs(distances), 0.0)
        weights[i, first:end] = values / values.sum()
    return weights.astype(np.float32)


def centre_crop(
    graph: ModelBuilder, x: ir.Value, before: tuple[int, int], after: tuple[int, int]
) -> ir.Value:
    """Add a cut of images [N,C,*before] to their middle, [N,C,*after]."""
    if before == after:
        return x
    # as torchvision, which rounds halves to even numbers
    starts = [round((size - new) / 2.0) for size, new in zip(before, after, strict=True)]
    ends = [start + new for start, new in zip(starts, after, strict=True)]
    with graph.scope("crop"):
        return graph.op("Slice", x, graph.constant(starts), graph.constant(ends), graph.constant([2, 3]))
