# SPDX-License-Identifier: Apache-2.0
"""ResNet without its classifier, in the graph of ACT.

Batch norms are constant at inference: they are part of the convolutions' weights.

Source of the model: torchvision, models/resnet.py and ops/misc.py (FrozenBatchNorm2d).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.act.architecture import EXPANSION, WIDTHS, ResNet

EPSILON = 1e-5  # of FrozenBatchNorm2d


# x -- conv1 (7 x 7) -- Relu -- MaxPool -- layer1 -- ... -- layer4 -->
def resnet(graph: ModelBuilder, x: ir.Value, shape: ResNet) -> ir.Value:
    """Add the backbone, x [N,3,H,W] -> [N,C,h,w]."""
    x = graph.op("Relu", _convolution(graph, x, ("conv1", "bn1"), (3, WIDTHS[0], 7), 2))
    x = graph.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = WIDTHS[0]
    for stage, (width, blocks) in enumerate(zip(WIDTHS, shape.blocks, strict=True)):
        last_dilated = shape.dilated and stage == len(WIDTHS) - 1
        for block in range(blocks):
            first = block == 0
            stride = 2 if first and stage and not last_dilated else 1
            dilation = 2 if last_dilated and not first else 1
            add = _bottleneck if shape.bottleneck else _basic_block
            with graph.module(f"layer{stage + 1}.{block}"):
                x = add(graph, x, (channels, width), stride, dilation)
            channels = width * (EXPANSION if shape.bottleneck else 1)
    return x


# x --+-- conv1 -- Relu -- conv2 --(+)-- Relu -->
#     +-- downsample ---------------+
def _basic_block(
    graph: ModelBuilder, x: ir.Value, widths: tuple[int, int], stride: int, dilation: int
) -> ir.Value:
    """Add two 3 x 3 convolutions beside a residual.

    widths: channels of x and of the result.
    """
    channels, width = widths
    y = graph.op("Relu", _convolution(graph, x, ("conv1", "bn1"), (channels, width, 3), stride, dilation))
    y = _convolution(graph, y, ("conv2", "bn2"), (width, width, 3), 1, dilation)
    return graph.op("Relu", graph.op("Add", y, _residual(graph, x, (channels, width), stride)))


# x --+-- conv1 (1 x 1) -- Relu -- conv2 (3 x 3) -- Relu -- conv3 (1 x 1) --(+)-- Relu -->
#     +-- downsample ---------------------------------------------------------+
def _bottleneck(
    graph: ModelBuilder, x: ir.Value, widths: tuple[int, int], stride: int, dilation: int
) -> ir.Value:
    """Add three convolutions beside a residual.

    widths: channels of x and of the middle.
    """
    channels, width = widths
    out = width * EXPANSION
    y = graph.op("Relu", _convolution(graph, x, ("conv1", "bn1"), (channels, width, 1), 1))
    y = graph.op("Relu", _convolution(graph, y, ("conv2", "bn2"), (width, width, 3), stride, dilation))
    y = _convolution(graph, y, ("conv3", "bn3"), (width, out, 1), 1)
    return graph.op("Relu", graph.op("Add", y, _residual(graph, x, (channels, out), stride)))


def _residual(graph: ModelBuilder, x: ir.Value, widths: tuple[int, int], stride: int) -> ir.Value:
    """Return x in the shape of a block's result.

    A convolution is added if x has another shape.
    """
    if stride == 1 and widths[0] == widths[1]:
        return x
    return _convolution(graph, x, ("downsample.0", "downsample.1"), (*widths, 1), stride)


def _convolution(
    graph: ModelBuilder,
    x: ir.Value,
    names: tuple[str, str],
    sizes: tuple[int, int, int],
    stride: int,
    dilation: int = 1,
) -> ir.Value:
    """Add a convolution and its batch norm as one.

    names: of convolution and norm; sizes: channels of x and of the result, side of the kernel.
    """
    fan_in, fan_out, side = sizes
    weights = graph.weights
    kernel, norm = graph.full_name(f"{names[0]}.weight"), graph.full_name(names[1])
    weights.require(kernel, (fan_out, fan_in, side, side))
    for part in ("weight", "bias", "running_mean", "running_var"):
        weights.require(f"{norm}.{part}", (fan_out,))

    def factor() -> np.ndarray:
        scale, variance = (
            weights.read(f"{norm}.{part}").astype(np.float32) for part in ("weight", "running_var")
        )
        return scale / np.sqrt(variance + np.float32(EPSILON))

    def read_kernel() -> np.ndarray:
        return weights.read(kernel).astype(np.float32) * factor()[:, None, None, None]

    def read_bias() -> np.ndarray:
        bias, mean = (weights.read(f"{norm}.{part}").astype(np.float32) for part in ("bias", "running_mean"))
        return bias - mean * factor()

    pad = dilation * (side // 2)
    with graph.scope(names[0]):
        return graph.op(
            "Conv",
            x,
            graph.weight(kernel, (fan_out, fan_in, side, side), read_kernel),
            graph.weight(f"{norm}.bias", (fan_out,), read_bias),
            kernel_shape=[side, side],
            strides=[stride, stride],
            dilations=[dilation, dilation],
            pads=[pad] * 4,
        )
