# SPDX-License-Identifier: Apache-2.0
"""Graph of Diffusion Policy's U-Net: from noisy actions to noise or clean ones.

Features are [n,channels,T]: the values that a norm takes together are side by side.

Source of the model: LeRobot 0.4.4, policies/diffusion/modeling_diffusion.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.diffusion.architecture import DiffusionArchitecture, UNetShape
from edgellm_ros.builder.policies.diffusion.convolution import (
    TrajectoryBuilder,
    doubled_taps,
    taps,
)
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
    actions = [architecture.horizon, architecture.action_dim]
    graph = TrajectoryBuilder("action", weights, precision, actions)
    time = graph.input(names.TIME, FLOAT, [1])
    condition = graph.input(names.CONDITION, FLOAT, [1, architecture.condition])
    shape = architecture.unet
    with graph.module("diffusion"), graph.module(architecture.unet_name):
        embedded = _time(graph, time, shape.time_width)
        joined = graph.op("Concat", embedded, graph.from_fp32(condition), axis=1)
        film = _film(graph, shape, joined, shape.time_width + architecture.condition)
        x = graph.transpose(graph.from_fp32(graph.trajectory), (0, 2, 1))
        x = _levels(graph, shape, film, x, actions)
        first = shape.widths[0]
        with graph.module("final_conv"):
            last = _Sizes((first, first), architecture.horizon)
            x = _conv_block(graph, "0.block", x, last, shape.kernel, LAST_GROUPS)
            places = taps(architecture.horizon, 1)
            x = graph.convolved_rows("1", x, (first, architecture.action_dim), places)
        result = graph.to_fp32(x)
    graph.output(result, names.PREDICTION, FLOAT, ["n", *actions])
    return graph


# From the name of a block to the scale and the shift of its features, [width,1] each; None = no scale.
_Film = Mapping[str, tuple[ir.Value | None, ir.Value]]


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


# condition -- Mish --+-- film.0 -- Split -- scales, shifts of the blocks of level 0
#                     +-- ...
def _film(graph: ModelBuilder, shape: UNetShape, condition: ir.Value, size: int) -> _Film:
    """Add what a condition [1,size] makes of the features of all blocks.

    One product for each level: its parts have one size, as ONNX Runtime's CUDA provider needs to split them
    without a copy from the host.
    """
    raised, last = mish(graph, condition), len(shape.widths) - 1
    film: dict[str, tuple[ir.Value | None, ir.Value]] = {}
    for level, width in enumerate(shape.widths):
        up = "mid_modules" if level == last else f"up_modules.{last - 1 - level}"
        up_names = (f"{up}.0", f"{up}.1")
        blocks, count = (f"down_modules.{level}.0", f"down_modules.{level}.1", *up_names), 1 + shape.scales
        parts = {f"{block}.cond_encoder.1": count * width for block in blocks}
        values = graph.joined_linears(f"film.{level}", parts, raised, size, bias=True)
        columns = graph.split(graph.reshape(values, [-1, 1]), [width] * (count * len(blocks)), axis=0)
        scales = columns[::2] if shape.scales else [None] * len(blocks)
        film |= dict(zip(blocks, zip(scales, columns[count - 1 :: count], strict=True), strict=True))
    return film


def _levels(
    graph: TrajectoryBuilder, shape: UNetShape, film: _Film, x: ir.Value, actions: list[int]
) -> ir.Value:
    """Add the levels down and up: [n,A,T] -> [n,widths[0],T]; actions: T and A."""
    widths, skips, (steps, dim) = shape.widths, [], actions

    def block(name: str, x: ir.Value, before: int, after: int) -> ir.Value:
        return _block(graph, name, shape, film, x, _Sizes((before, after), steps))

    for level, (before, width) in enumerate(zip((dim, *widths), widths, strict=False)):
        module = f"down_modules.{level}"
        x = block(f"{module}.0", x, before, width)
        x = block(f"{module}.1", x, width, width)
        skips.append(x)
        if level < len(widths) - 1:
            x = graph.convolution(f"{module}.2", x, (width, width), taps(steps, 3, stride=2))
            steps //= 2
    for number in range(2):
        x = block(f"mid_modules.{number}", x, widths[-1], widths[-1])
    for level in range(len(widths) - 1):
        width, after = widths[-1 - level], widths[-2 - level]
        module = f"up_modules.{level}"
        x = graph.op("Concat", x, skips.pop(), axis=1)
        x = block(f"{module}.0", x, 2 * width, after)
        x = block(f"{module}.1", x, after, after)
        x = graph.convolution(f"{module}.2", x, (after, after), doubled_taps(steps))
        steps *= 2
    return x


# x --+-- conv1 -- FiLM -- conv2 --(+)-->
#     +-- residual_conv ------------+
def _block(
    graph: TrajectoryBuilder, name: str, shape: UNetShape, film: _Film, x: ir.Value, sizes: _Sizes
) -> ir.Value:
    """Add a residual block: [n,widths[0],T] -> [n,widths[1],T]."""
    before, width = sizes.widths
    with graph.module(name):
        y = _conv_block(graph, "conv1.block", x, sizes, shape.kernel, shape.groups)
        scale, shift = film[name]
        y = graph.op("Add", y if scale is None else graph.op("Mul", scale, y), shift)
        inner = _Sizes((width, width), sizes.steps)
        y = _conv_block(graph, "conv2.block", y, inner, shape.kernel, shape.groups)
        if before != width:
            x = graph.convolution("residual_conv", x, sizes.widths, taps(sizes.steps, 1))
        return graph.op("Add", y, x)


# x -- 0 (convolution) -- 1 (group norm) -- Mish -->
def _conv_block(
    graph: TrajectoryBuilder, name: str, x: ir.Value, sizes: _Sizes, kernel: int, groups: int
) -> ir.Value:
    with graph.module(name):
        y = graph.convolution("0", x, sizes.widths, taps(sizes.steps, kernel))
        return mish(graph, group_norm(graph, "1", y, sizes.widths[1], groups, (sizes.steps,)))
