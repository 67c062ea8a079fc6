# SPDX-License-Identifier: Apache-2.0
"""Graph of X-VLA's vision tower, DaViT: from camera images to rows.

Source of the model: transformers, modeling_florence2.py (Florence2VisionBackbone and
Florence2MultiModalProjector); LeRobot 0.6.1, policies/xvla.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.attention import attend_heads
from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.xvla.architecture import (
    EPSILON,
    PROJECTOR,
    TOWER,
    DaViT,
    Stage,
    XVLAArchitecture,
)
from edgellm_ros.builder.policies.xvla.rows import join_rows
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
FILL = 2.0  # marks what is around an image, whose own values are from -1 to 1
BETWEEN = 1.5


# pixel_values -- convs.0 -- blocks.0 -- ... -- convs.3 -- blocks.3 -- positions -- projection -- image_embeds
def build_vision(architecture: XVLAArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `visual/model.onnx`.

    Input: pixel_values [N,3,side,side] fp32, of N cameras, from -1 to 1, and FILL around an image.

    Output: image_embeds [R,H] in the precision's type: of each camera the mean of its places, and the places.
    """
    graph = ModelBuilder("visual", weights, precision)
    tower, hidden = architecture.tower, architecture.text.hidden_size
    side = tower.image_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["N", 3, side, side])
    x, size = _normalised(graph, pixels), 3
    for i, stage in enumerate(tower.stages):
        with graph.module(f"{TOWER}.convs.{i}", nodes=f"convs.{i}"):
            if i:  # from the rows of the stage before
                normed = graph.layer_norm("norm", x, size, EPSILON) if stage.norm_first else x
                x = _map(graph, normed, size, side)
            x = _embed(graph, stage, x, size)
        size, side = stage.size, stage.side(side)
        for j in range(stage.depth):
            with graph.module(f"{TOWER}.blocks.{i}.{j}", nodes=f"blocks.{i}.{j}"):
                x = _block(graph, stage, tower.window, x, side, "spatial")
                x = _block(graph, stage, tower.window, x, side, "channel")
    x = graph.op("Add", x, _positions(graph, tower))
    mean = graph.op("ReduceMean", x, graph.constant([1]), keepdims=1)
    x = join_rows(graph, mean, x, width=size)
    with graph.module(PROJECTOR, nodes="projector"):
        x = _projection(graph, tower, x, size, hidden)
        x = graph.reshape(graph.layer_norm("image_proj_norm", x, hidden, EPSILON), [-1, hidden])
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", hidden])
    return graph


def _normalised(graph: ModelBuilder, pixels: ir.Value) -> ir.Value:
    """Normalise pixels by ImageNet's statistics; what is around an image becomes 0."""
    mean, std = (np.array(each)[:, None, None] for each in (MEAN, STD))
    with graph.scope("normalise"):
        scaled = graph.op("Mul", pixels, graph.constant(0.5 / std, FLOAT))
        scaled = graph.op("Add", scaled, graph.constant((0.5 - mean) / std, FLOAT))
        around = graph.op("Greater", pixels, graph.constant(BETWEEN, FLOAT))
        return graph.from_fp32(graph.op("Where", around, graph.constant(0.0, FLOAT), scaled))


def _rows(graph: ModelBuilder, x: ir.Value, size: int) -> ir.Value:
    """Convert a map [N,C,h,w] to rows [N,h*w,C]."""
    return graph.transpose(graph.reshape(x, [0, size, -1]), (0, 2, 1))


def _map(graph: ModelBuilder, x: ir.Value, size: int, side: int) -> ir.Value:
    """Convert rows [N,h*w,C] to a map [N,C,h,w]."""
    return graph.reshape(graph.transpose(x, (0, 2, 1)), [0, size, side, side])


# x -- conv -- norm (unless it is before) -->
def _embed(graph: ModelBuilder, stage: Stage, x: ir.Value, size: int) -> ir.Value:
    """Add a stage's convolution of a map [N,size,h,w]; return rows [N,P,C]."""
    kernel = graph.tensor("conv.weight", stage.size, size, stage.kernel, stage.kernel)
    x = graph.op(
        "Conv", x, kernel, graph.tensor("conv.bias", stage.size), kernel_shape=[stage.kernel] * 2,
        strides=[stage.stride] * 2, pads=[stage.padding] * 4,
    )  # fmt: skip
    x = _rows(graph, x, stage.size)
    return x if stage.norm_first else graph.layer_norm("norm", x, stage.size, EPSILON)


# x --+-- conv1 --(+)--+-- norm1 -- attention --(+)--+-- conv2 --(+)--+-- norm2 -- ffn --(+)-->
#     +------------+   +--------------------------+   +------------+   +----------------+
def _block(graph: ModelBuilder, stage: Stage, window: int, x: ir.Value, side: int, kind: str) -> ir.Value:
    """Add a block [N,P,C].

    kind: "spatial", whose attention is among places, or "channel", whose attention is among values.
    """
    size = stage.size
    with graph.module(f"{kind}_block"):
        x = _convolved(graph, "conv1", x, size, side)
        normed = graph.layer_norm("norm1", x, size, EPSILON)
        if kind == "spatial":
            update = _window_attention(graph, stage, window, normed, side)
        else:
            update = _channel_attention(graph, stage, normed, side)
        x = _convolved(graph, "conv2", graph.op("Add", x, update), size, side)
        normed = graph.layer_norm("norm2", x, size, EPSILON)
        with graph.module("ffn"):
            raised = graph.op("Gelu", graph.linear("fc1", normed, size, 4 * size, bias=True))
            return graph.op("Add", x, graph.linear("fc2", raised, 4 * size, size, bias=True))


def _convolved(graph: ModelBuilder, name: str, x: ir.Value, size: int, side: int) -> ir.Value:
    """Add a 3 x 3 convolution of each value by itself, and its input."""
    with graph.module(name):
        kernel, bias = graph.tensor("weight", size, 1, 3, 3), graph.tensor("bias", size)
        y = graph.op(
            "Conv", _map(graph, x, size, side), kernel, bias, group=size, kernel_shape=[3, 3],
            pads=[1, 1, 1, 1],
        )  # fmt: skip
        return graph.op("Add", x, _rows(graph, y, size))


# x -- Gather (windows) -- qkv -- Attention -- proj -- Gather (places) -->
def _window_attention(graph: ModelBuilder, stage: Stage, window: int, x: ir.Value, side: int) -> ir.Value:
    """Add attention among the places of each window [N,P,C].

    Windows at the right and bottom edge are filled up with zeros, which are attended to.
    """
    size, windows = stage.size, _windows(side, window)
    with graph.module("window_attn", nodes="attn"):
        if windows.max() == side**2:
            # a row of zeros in place of Pad, which ONNX Runtime's CUDA provider lacks in bf16
            images = graph.op("Shape", x, start=0, end=1)
            zeros = graph.op("Expand", graph.constant([[[0]]], graph.dtype), _with(graph, images, [1, size]))
            x = join_rows(graph, x, zeros, width=size)
        rows = graph.reshape(graph.op("Gather", x, graph.constant(windows), axis=1), [-1, window**2, size])
        parts = graph.split(graph.linear("qkv", rows, size, 3 * size, bias=True), [size] * 3, axis=-1)
        rows = attend_heads(graph, parts, stage.heads, size // stage.heads)
        rows = graph.linear("proj", rows, size, size, bias=True)
        rows = graph.reshape(rows, [-1, windows.size, size])
        places = np.argsort(windows.reshape(-1), kind="stable")[: side**2]
        return graph.op("Gather", rows, graph.constant(places), axis=1)


def _with(graph: ModelBuilder, first: ir.Value, others: list[int]) -> ir.Value:
    """Make a shape of its first dimension [1] and the others."""
    return graph.op("Concat", first, graph.constant(others), axis=0)


def _windows(side: int, window: int) -> np.ndarray:
    """Return the places of each window, row by row, int64 [windows, window**2].

    A place beyond the edge is `side**2`.
    """
    count = -(-side // window)
    whole = np.full((count * window, count * window), side**2)
    whole[:side, :side] = np.arange(side**2).reshape(side, side)
    cells = whole.reshape(count, window, count, window).transpose(0, 2, 1, 3)
    return cells.reshape(count**2, window**2)


# x -- qkv -- MatMul -- Softmax -- MatMul -- proj -->
def _channel_attention(graph: ModelBuilder, stage: Stage, x: ir.Value, side: int) -> ir.Value:
    """Add attention among the values of each group, over all places [N,P,C].

    Not Attention, whose heads would have as many values as an image has places.
    """
    size, places = stage.size, side**2
    with graph.module("channel_attn", nodes="attn"):
        parts = graph.split(graph.linear("qkv", x, size, 3 * size, bias=True), [size] * 3, axis=-1)
        split = [0, places, stage.groups, size // stage.groups]
        q, k, v = (graph.reshape(part, split) for part in parts)
        q = graph.op("Mul", q, graph.constant(places**-0.5, graph.dtype))
        scores = graph.op("MatMul", graph.transpose(q, (0, 2, 3, 1)), graph.transpose(k, (0, 2, 1, 3)))
        weights = graph.op("Softmax", scores, axis=-1)
        rows = graph.op("MatMul", weights, graph.transpose(v, (0, 2, 3, 1)))  # [N,groups,C/groups,P]
        rows = graph.reshape(graph.transpose(rows, (0, 3, 1, 2)), [0, places, size])
        return graph.linear("proj", rows, size, size, bias=True)


def _positions(graph: ModelBuilder, tower: DaViT) -> ir.Value:
    """Add the positions of all places [P,C].

    A position is that of the column and the row, and that of the first image in time.
    """
    size, side, weights = tower.stages[-1].size, tower.side, graph.weights
    grid, time = f"{PROJECTOR}.image_position_embed", f"{PROJECTOR}.visual_temporal_embed.pos_idx_to_embed"
    columns, rows = f"{grid}.column_embeddings.weight", f"{grid}.row_embeddings.weight"
    weights.require(columns, (tower.positions, size - size // 2))
    weights.require(rows, (tower.positions, size // 2))
    weights.require(time, (tower.times, size))

    def read() -> np.ndarray:
        of_column, of_row = (weights.read(name)[:side].astype(np.float32) for name in (columns, rows))
        places = np.concatenate([np.tile(of_column, (side, 1)), np.repeat(of_row, side, axis=0)], axis=1)
        return places + weights.read(time)[0].astype(np.float32)

    return graph.weight(f"{PROJECTOR}.positions", (side**2, size), read)


def _projection(graph: ModelBuilder, tower: DaViT, x: ir.Value, size: int, hidden: int) -> ir.Value:
    """Add the last projection, [...,size] -> [...,hidden]."""
    if not tower.transposed:
        return graph.linear("image_projection", x, size, hidden)
    return graph.op("MatMul", x, graph.tensor("image_projection.weight", size, hidden))
