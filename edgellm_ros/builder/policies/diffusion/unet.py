# SPDX-License-Identifier: Apache-2.0
"""Graph of Diffusion Policy's U-Net: from noisy actions to noise or clean ones.

Source of the model: LeRobot 0.4.4, policies/diffusion/modeling_diffusion.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.diffusion.architecture import DiffusionArchitecture, UNetShape
from edgellm_ros.builder.policies.group_norm import group_norm
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

PERIOD = 10000.0  # longest of the embedding's sines, over 2 pi
LAST_GROUPS = 8  # of the norm of the last convolutions, which the configuration does not change
TIME_FACTOR = 4  # of the embedding's inner layer


# trajectory -- down_modules --+-- mid_modules -- up_modules -- final_conv -- prediction
#                              +------- skips -------+
# time, condition -- FiLM of each block
def build_unet(architecture: DiffusionArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `action/model.onnx`.

    Inputs:
    - trajectory [n,T,A] fp32: the noisy actions of n samples, normalised
    - time [1] fp32: the step of the training
    - condition [1,C] fp32: of the observations, as `prefix/model.onnx` computes it

    Output: prediction [n,T,A] fp32: the noise, or the clean actions.
    """
    graph = ModelBuilder("action", weights, precision)
    actions = [architecture.horizon, architecture.action_dim]
    trajectory = graph.input(names.TRAJECTORY, FLOAT, ["n", *actions])
    time = graph.input(names.TIME, FLOAT, [1])
    condition = graph.input(names.CONDITION, FLOAT, [1, architecture.condition])
    shape = architecture.unet
    with graph.module("diffusion"), graph.module(architecture.unet_name):
        embedded = _time(graph, time, shape.time_width)
        joined = graph.op("Concat", embedded, graph.from_fp32(condition), axis=1)
        # all blocks begin with the same Mish
        film = _Film(mish(graph, joined), shape.time_width + architecture.condition)
        x = graph.transpose(graph.from_fp32(trajectory), (0, 2, 1))
        x = _levels(graph, shape, film, x, actions)
        first = shape.widths[0]
        with graph.module("final_conv"):
            last = _Sizes((first, first), architecture.horizon)
            x = _conv_block(graph, "0.block", x, last, shape.kernel, LAST_GROUPS)
            x = _convolution(graph, "1", x, (first, architecture.action_dim), 1)
        result = graph.to_fp32(graph.transpose(x, (0, 2, 1)))
    graph.output(result, names.PREDICTION, FLOAT, ["n", *actions])
    return graph


@dataclass(frozen=True)
class _Film:
    """What scales and moves the features of all blocks."""

    condition: ir.Value  # [1,size]
    size: int


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a block: channels before and after it, and steps of the time."""

    widths: tuple[int, int]
    steps: int


def mish(graph: ModelBuilder, x: ir.Value) -> ir.Value:
    """Add x * tanh(log(1 + exp(x)))."""
    return graph.op("Mul", x, graph.op("Tanh", graph.op("Softplus", x)))


def _time(graph: ModelBuilder, time: ir.Value, width: int) -> ir.Value:
    """Add the embedding [1,width] of the time [1]."""
    half, inner = width // 2, TIME_FACTOR * width
    rates = np.exp(np.arange(half, dtype=np.float32) * np.float32(-np.log(PERIOD) / (half - 1)))
    with graph.module("diffusion_step_encoder"):
        angles = graph.op("Mul", time, graph.constant(rates[None], FLOAT))
        waves = graph.op("Concat", graph.op("Sin", angles), graph.op("Cos", angles), axis=1)
        raised = graph.linear("1", graph.from_fp32(waves), width, inner, bias=True)
        return graph.linear("3", mish(graph, raised), inner, width, bias=True)


def _levels(graph: ModelBuilder, shape: UNetShape, film: _Film, x: ir.Value, actions: list[int]) -> ir.Value:
    """Add the levels down and up: [n,A,T] -> [n,widths[0],T]; actions: T and A."""
    widths, skips, (steps, dim) = shape.widths, [], actions

    def block(name: str, x: ir.Value, before: int, after: int) -> ir.Value:
        return _block(graph, name, shape, film, x, _Sizes((before, after), steps))

    for level, (before, width) in enumerate(zip((dim, *widths), widths, strict=False)):
        with graph.module(f"down_modules.{level}"):
            x = block("0", x, before, width)
            x = block("1", x, width, width)
            skips.append(x)
            if level < len(widths) - 1:
                x = _convolution(graph, "2", x, (width, width), 3, stride=2)
                steps //= 2
    for number in range(2):
        x = block(f"mid_modules.{number}", x, widths[-1], widths[-1])
    for level in range(len(widths) - 1):
        width, after = widths[-1 - level], widths[-2 - level]
        with graph.module(f"up_modules.{level}"):
            x = graph.op("Concat", x, skips.pop(), axis=1)
            x = block("0", x, 2 * width, after)
            x = block("1", x, after, after)
            x = _doubled(graph, "2", x, after)
            steps *= 2
    return x


# x --+-- conv1 -- FiLM -- conv2 --(+)-->
#     +-- residual_conv ------------+
def _block(
    graph: ModelBuilder, name: str, shape: UNetShape, film: _Film, x: ir.Value, sizes: _Sizes
) -> ir.Value:
    """Add a residual block: [n,widths[0],T] -> [n,widths[1],T]."""
    before, width = sizes.widths
    with graph.module(name):
        y = _conv_block(graph, "conv1.block", x, sizes, shape.kernel, shape.groups)
        values = (1 + shape.scales) * width
        moved = graph.linear("cond_encoder.1", film.condition, film.size, values, bias=True)
        moved = graph.op("Unsqueeze", moved, graph.constant([2]))
        if shape.scales:
            scale, moved = graph.split(moved, [width, width], axis=1)
            y = graph.op("Mul", scale, y)
        y = graph.op("Add", y, moved)
        inner = _Sizes((width, width), sizes.steps)
        y = _conv_block(graph, "conv2.block", y, inner, shape.kernel, shape.groups)
        if before != width:
            x = _convolution(graph, "residual_conv", x, sizes.widths, 1)
        return graph.op("Add", y, x)


# x -- 0 (Conv) -- 1 (group norm) -- Mish -->
def _conv_block(
    graph: ModelBuilder, name: str, x: ir.Value, sizes: _Sizes, kernel: int, groups: int
) -> ir.Value:
    with graph.module(name):
        y = _convolution(graph, "0", x, sizes.widths, kernel)
        return mish(graph, group_norm(graph, "1", y, sizes.widths[1], groups, (sizes.steps,)))


def _convolution(
    graph: ModelBuilder, name: str, x: ir.Value, widths: tuple[int, int], kernel: int, *, stride: int = 1
) -> ir.Value:
    """Add a convolution over time, [n,widths[0],T] -> [n,widths[1],T / stride]."""
    with graph.module(name):
        weight, bias = graph.tensor("weight", widths[1], widths[0], kernel), graph.tensor("bias", widths[1])
        pads = [kernel // 2] * 2
        return graph.op("Conv", x, weight, bias, kernel_shape=[kernel], strides=[stride], pads=pads)


def _doubled(graph: ModelBuilder, name: str, x: ir.Value, width: int) -> ir.Value:
    """Add a transposed convolution over time, [n,width,T] -> [n,width,2 T].

    Computed in fp32 in place of bf16, which TensorRT does not have for it.
    """
    is_bf16 = graph.dtype == ir.DataType.BFLOAT16
    with graph.module(name):
        weights, full = graph.weights, graph.full_name("weight")
        dtype = FLOAT if is_bf16 else graph.dtype
        weights.require(full, (width, width, 4))
        weights.require(graph.full_name("bias"), (width,))
        weight = graph.weight(full, (width, width, 4), lambda: weights.read(full), dtype)
        bias_name = graph.full_name("bias")
        bias = graph.weight(bias_name, (width,), lambda: weights.read(bias_name), dtype)
        x = graph.to_fp32(x) if is_bf16 else x
        y = graph.op("ConvTranspose", x, weight, bias, kernel_shape=[4], strides=[2], pads=[1, 1])
        return graph.from_fp32(y) if is_bf16 else y
