# SPDX-License-Identifier: Apache-2.0
"""ResNet without its classifier, in the graphs of ACT and Diffusion Policy.

Batch norms are constant at inference: they are part of the convolutions' weights. Group norms are layers.

Source of the model: torchvision, models/resnet.py and ops/misc.py (FrozenBatchNorm2d).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.group_norm import group_norm

EPSILON = 1e-5  # of FrozenBatchNorm2d and BatchNorm2d
CHANNELS_PER_GROUP = 16  # of group norms
# Blocks of the four stages of torchvision's ResNets, and whether a block is a bottleneck.
RESNETS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
}
WIDTHS = (64, 128, 256, 512)  # of a stage's 3 x 3 convolutions
EXPANSION = 4  # of a bottleneck's last convolution


@dataclass(frozen=True)
class ResNetNames:
    """Names of modules: the first convolution and its norm, and the stages."""

    stem: tuple[str, str]
    stages: tuple[str, ...]


TORCHVISION = ResNetNames(("conv1", "bn1"), ("layer1", "layer2", "layer3", "layer4"))
SEQUENCE = ResNetNames(("0", "1"), ("4", "5", "6", "7"))  # its modules in an nn.Sequential


@dataclass(frozen=True)
class ResNet:
    """A backbone; `dilated`: its last stage has dilation in place of a stride."""

    blocks: tuple[int, ...]
    bottleneck: bool
    dilated: bool = False
    group_norm: bool = False  # in place of batch norm
    names: ResNetNames = TORCHVISION

    @property
    def channels(self) -> int:
        """Return the number of values of a place of the last stage."""
        return WIDTHS[-1] * (EXPANSION if self.bottleneck else 1)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last stage for an image of this size in pixels."""
        halvings = 4 if self.dilated else 5
        for _ in range(halvings):  # of convolutions and a pool
            height, width = _strided((height, width), 2)
        return height, width


def resnet(graph: ModelBuilder, x: ir.Value, shape: ResNet, size: tuple[int, int]) -> ir.Value:
    """Add the backbone, x [N,3,H,W] of size (H, W) -> [N,C,h,w]."""
    return _Backbone(graph, shape).build(_Map(x, size)).value


@dataclass(frozen=True)
class _Map:
    """Features [N,C,*size]."""

    value: ir.Value
    size: tuple[int, int]  # (height, width)


@dataclass(frozen=True)
class _Backbone:
    """Adds the parts of a backbone to a graph."""

    graph: ModelBuilder
    shape: ResNet

    # x -- conv1 (7 x 7) -- Relu -- MaxPool -- layer1 -- ... -- layer4 -->
    def build(self, x: _Map) -> _Map:
        graph, shape = self.graph, self.shape
        x = self._relu(self._convolution(x, shape.names.stem, (3, WIDTHS[0], 7), 2))
        pooled = graph.op("MaxPool", x.value, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
        x = _Map(pooled, _strided(x.size, 2))
        channels = WIDTHS[0]
        for stage, (width, blocks) in enumerate(zip(WIDTHS, shape.blocks, strict=True)):
            last_dilated = shape.dilated and stage == len(WIDTHS) - 1
            for block in range(blocks):
                first = block == 0
                stride = 2 if first and stage and not last_dilated else 1
                dilation = 2 if last_dilated and not first else 1
                add = self._bottleneck if shape.bottleneck else self._basic_block
                with graph.module(f"{shape.names.stages[stage]}.{block}"):
                    x = add(x, (channels, width), stride, dilation)
                channels = width * (EXPANSION if shape.bottleneck else 1)
        return x

    # x --+-- conv1 -- Relu -- conv2 --(+)-- Relu -->
    #     +-- downsample ---------------+
    def _basic_block(self, x: _Map, widths: tuple[int, int], stride: int, dilation: int) -> _Map:
        """Add two 3 x 3 convolutions beside a residual.

        widths: channels of x and of the result.
        """
        channels, width = widths
        y = self._convolution(x, ("conv1", "bn1"), (channels, width, 3), stride, dilation)
        y = self._convolution(self._relu(y), ("conv2", "bn2"), (width, width, 3), 1, dilation)
        return self._sum(y, self._residual(x, (channels, width), stride))

    # x --+-- conv1 (1 x 1) -- Relu -- conv2 (3 x 3) -- Relu -- conv3 (1 x 1) --(+)-- Relu -->
    #     +-- downsample ---------------------------------------------------------+
    def _bottleneck(self, x: _Map, widths: tuple[int, int], stride: int, dilation: int) -> _Map:
        """Add three convolutions beside a residual.

        widths: channels of x and of the middle.
        """
        channels, width = widths
        out = width * EXPANSION
        y = self._relu(self._convolution(x, ("conv1", "bn1"), (channels, width, 1), 1))
        y = self._convolution(y, ("conv2", "bn2"), (width, width, 3), stride, dilation)
        y = self._convolution(self._relu(y), ("conv3", "bn3"), (width, out, 1), 1)
        return self._sum(y, self._residual(x, (channels, out), stride))

    def _residual(self, x: _Map, widths: tuple[int, int], stride: int) -> _Map:
        """Return x in the shape of a block's result.

        A convolution is added if x has another shape.
        """
        if stride == 1 and widths[0] == widths[1]:
            return x
        return self._convolution(x, ("downsample.0", "downsample.1"), (*widths, 1), stride)

    def _relu(self, x: _Map) -> _Map:
        return _Map(self.graph.op("Relu", x.value), x.size)

    def _sum(self, x: _Map, residual: _Map) -> _Map:
        return self._relu(_Map(self.graph.op("Add", x.value, residual.value), x.size))

    def _convolution(
        self, x: _Map, names: tuple[str, str], sizes: tuple[int, int, int], stride: int, dilation: int = 1
    ) -> _Map:
        """Add a convolution and its norm; a batch norm is part of its weights.

        names: of convolution and norm; sizes: channels of x and of the result, side of the kernel.
        """
        graph, (_, fan_out, side) = self.graph, sizes
        norm = names[1] if self.shape.group_norm else ""
        parameters = self._plain(names[0], sizes) if norm else self._with_batch_norm(names, sizes)
        pad = dilation * (side // 2)
        with graph.scope(names[0]):
            y = graph.op(
                "Conv",
                x.value,
                *parameters,
                kernel_shape=[side, side],
                strides=[stride, stride],
                dilations=[dilation, dilation],
                pads=[pad] * 4,
            )
        size = _strided(x.size, stride)
        if norm:
            y = group_norm(graph, norm, y, fan_out, fan_out // CHANNELS_PER_GROUP, size)
        return _Map(y, size)

    def _plain(self, name: str, sizes: tuple[int, int, int]) -> tuple[ir.Value]:
        """Add the kernel of a convolution without bias."""
        fan_in, fan_out, side = sizes
        return (self.graph.tensor(f"{name}.weight", fan_out, fan_in, side, side),)

    def _with_batch_norm(
        self, names: tuple[str, str], sizes: tuple[int, int, int]
    ) -> tuple[ir.Value, ir.Value]:
        """Add kernel and bias of a convolution with its batch norm."""
        graph, (fan_in, fan_out, side) = self.graph, sizes
        weights = graph.weights
        kernel, norm = graph.full_name(f"{names[0]}.weight"), graph.full_name(names[1])
        weights.require(kernel, (fan_out, fan_in, side, side))
        for part in ("weight", "bias", "running_mean", "running_var"):
            weights.require(f"{norm}.{part}", (fan_out,))

        def read(part: str) -> np.ndarray:
            return weights.read(f"{norm}.{part}").astype(np.float32)

        def factor() -> np.ndarray:
            return read("weight") / np.sqrt(read("running_var") + np.float32(EPSILON))

        def read_kernel() -> np.ndarray:
            return weights.read(kernel).astype(np.float32) * factor()[:, None, None, None]

        return (
            graph.weight(kernel, (fan_out, fan_in, side, side), read_kernel),
            graph.weight(f"{norm}.bias", (fan_out,), lambda: read("bias") - read("running_mean") * factor()),
        )


def _strided(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return the size after a stride, with a padding that keeps the border."""
    return -(-size[0] // stride), -(-size[1] // stride)
