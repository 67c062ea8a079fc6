# SPDX-License-Identifier: Apache-2.0
"""Graph of ACT: from images and state to a chunk of actions.

At inference the latent is zero, so that its row is the bias of its layer; the encoder of the variational
objective takes no part.

Source of the model: LeRobot 0.4.4, policies/act/modeling_act.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, UINT8
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.act.architecture import ACTArchitecture
from edgellm_ros.builder.policies.pixels import normalised
from edgellm_ros.builder.policies.resnet import resnet
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

EPSILON = 1e-5  # of LayerNorm in PyTorch
TEMPERATURE = 10000.0  # of the positions' wavelengths


# camera_image_i -- ResNet -- encoder_img_feat_input_proj --+-- encoder --+
# state -- encoder_robot_state_input_proj ------------------+             |
# zeros -- decoder_pos_embed ------------------------------------------ decoder -- action_head -- actions
def build_act(architecture: ACTArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `action/model.onnx`.

    Inputs:
    - camera_image_i [H,W,3] uint8, RGB: of each camera in its own size
    - state [1,S] fp32: normalised; the robot's state, then the environment's. Absent if there is neither

    Output: actions [T,A] fp32, normalised.
    """
    graph = ModelBuilder("action", weights, precision)
    hidden = architecture.hidden_size
    pixels = [
        graph.input(names.camera_image(i), UINT8, [image.height, image.width, 3])
        for i, image in enumerate(architecture.images)
    ]
    with graph.module("model"):
        rows = [_latent(graph, hidden), *_states(graph, architecture)]
        rows += _image_rows(graph, architecture, pixels)
        x = graph.op("Unsqueeze", graph.op("Concat", *rows, axis=0), graph.constant([0]))
        positions = _positions(graph, architecture)
        for i in range(architecture.encoder_layers):
            with graph.module(f"encoder.layers.{i}"):
                x = _encoder_layer(graph, architecture, x, positions)
        if architecture.norm_first:
            x = graph.layer_norm("encoder.norm", x, hidden, EPSILON)
        y = _decoder(graph, architecture, x, positions)
        y = graph.linear("action_head", y, hidden, architecture.action_dim, bias=True)
    result = graph.to_fp32(graph.op("Squeeze", y, graph.constant([0])))
    graph.output(result, names.ACTIONS, FLOAT, [architecture.horizon, architecture.action_dim])
    return graph


def _latent(graph: ModelBuilder, hidden: int) -> ir.Value:
    """Add the row [1,hidden] of a latent of zeros."""
    bias = graph.tensor("encoder_latent_input_proj.bias", hidden)
    return graph.op("Unsqueeze", bias, graph.constant([0]))


def _states(graph: ModelBuilder, architecture: ACTArchitecture) -> list[ir.Value]:
    """Add the rows [1,hidden] of the robot's and the environment's state, if any."""
    layers = {
        "encoder_robot_state_input_proj": architecture.state_dim,
        "encoder_env_state_input_proj": architecture.environment_dim,
    }
    sizes = {name: size for name, size in layers.items() if size}
    if not sizes:
        return []
    state = graph.from_fp32(graph.input(names.STATE, FLOAT, [1, sum(sizes.values())]))
    parts = graph.split(state, list(sizes.values()), axis=1) if len(sizes) > 1 else [state]
    return [
        graph.linear(name, part, size, architecture.hidden_size, bias=True)
        for (name, size), part in zip(sizes.items(), parts, strict=True)
    ]


def _image_rows(
    graph: ModelBuilder, architecture: ACTArchitecture, pixels: Sequence[ir.Value]
) -> list[ir.Value]:
    """Add the rows [R,hidden] of each camera's image.

    Images of one size are one batch.
    """
    shape, hidden, rows = architecture.resnet, architecture.hidden_size, {}
    sizes = [(image.height, image.width) for image in architecture.images]
    for size in dict.fromkeys(sizes):
        chosen = [i for i, each in enumerate(sizes) if each == size]
        images = [normalised(graph, pixels[i], architecture.images[i]) for i in chosen]
        x = graph.op("Concat", *images, axis=0) if len(images) > 1 else images[0]
        with graph.module("backbone"):
            x = resnet(graph, x, shape, size)
        height, width = shape.grid(*size)
        x = graph.transpose(graph.reshape(x, [len(chosen), shape.channels, height * width]), (0, 2, 1))
        x = graph.linear("encoder_img_feat_input_proj", x, shape.channels, hidden, bias=True)
        parts = graph.split(x, [1] * len(chosen), axis=0) if len(chosen) > 1 else [x]
        for i, part in zip(chosen, parts, strict=True):
            rows[i] = graph.op("Squeeze", part, graph.constant([0]))
    return [rows[i] for i in range(len(sizes))]


def _positions(graph: ModelBuilder, architecture: ACTArchitecture) -> ir.Value:
    """Add the positions [1,S,hidden] of the encoder's rows.

    The learned ones come before those of images.
    """
    hidden, learned = architecture.hidden_size, architecture.other_rows
    weights, full = graph.weights, graph.full_name("encoder_1d_feature_pos_embed.weight")
    weights.require(full, (learned, hidden))
    grids = [architecture.resnet.grid(image.height, image.width) for image in architecture.images]

    def read() -> np.ndarray:
        images = [grid_positions(height, width, hidden) for height, width in grids]
        return np.concatenate([weights.read(full).astype(np.float32), *images])[None]

    rows = learned + sum(height * width for height, width in grids)
    return graph.weight(graph.full_name("encoder_positions"), (1, rows, hidden), read)


def grid_positions(height: int, width: int, hidden: int) -> np.ndarray:
    """Compute positions [height * width, hidden] of a grid, row by row: y, then x.

    Sines and cosines take turns. Computed in fp32, as in the reference.
    """
    half, two_pi = hidden // 2, np.float32(2 * np.pi)
    exponents = 2 * (np.arange(half) // 2).astype(np.float32) / np.float32(half)
    wavelengths = np.float32(TEMPERATURE) ** exponents
    lines = []
    for size in (height, width):
        places = np.arange(1, size + 1, dtype=np.float32)
        angles = (places / (places[-1] + np.float32(1e-6)) * two_pi)[:, None] / wavelengths
        lines.append(np.where(np.arange(half) % 2 == 0, np.sin(angles), np.cos(angles)))
    y = np.repeat(lines[0][:, None], width, axis=1)
    x = np.repeat(lines[1][None], height, axis=0)
    return np.concatenate([y, x], axis=-1).reshape(height * width, hidden)


# x --+-- self_attn --(+)-- norm1 --+-- linear1, linear2 --(+)-- norm2 -->   (norms after the sums)
#     +----------------+            +-----------------------+
def _encoder_layer(
    graph: ModelBuilder, architecture: ACTArchitecture, x: ir.Value, positions: ir.Value
) -> ir.Value:
    """Add a layer of the encoder, x [1,S,hidden] -> the same."""

    def attention(y: ir.Value) -> ir.Value:
        query = graph.op("Add", y, positions)
        return _attention(graph, architecture, "self_attn", query, query, y)

    x = _sublayer(graph, architecture, "norm1", x, attention)
    return _sublayer(graph, architecture, "norm2", x, lambda y: _feed_forward(graph, architecture, y))


def _decoder(
    graph: ModelBuilder, architecture: ACTArchitecture, encoded: ir.Value, positions: ir.Value
) -> ir.Value:
    """Add the decoder: from rows of zeros to [1,T,hidden]."""
    hidden, steps = architecture.hidden_size, architecture.horizon
    table = graph.tensor("decoder_pos_embed.weight", steps, hidden)
    queries = graph.op("Unsqueeze", table, graph.constant([0]))
    keys = graph.op("Add", encoded, positions)
    x = graph.weight("decoder_start", (1, steps, hidden), lambda: np.zeros((1, steps, hidden), np.float32))

    def own(y: ir.Value) -> ir.Value:
        query = graph.op("Add", y, queries)
        return _attention(graph, architecture, "self_attn", query, query, y)

    def cross(y: ir.Value) -> ir.Value:
        return _attention(graph, architecture, "multihead_attn", graph.op("Add", y, queries), keys, encoded)

    for i in range(architecture.decoder_layers):
        with graph.module(f"decoder.layers.{i}"):
            x = _sublayer(graph, architecture, "norm1", x, own)
            x = _sublayer(graph, architecture, "norm2", x, cross)
            x = _sublayer(graph, architecture, "norm3", x, lambda y: _feed_forward(graph, architecture, y))
    return graph.layer_norm("decoder.norm", x, hidden, EPSILON)


def _sublayer(
    graph: ModelBuilder,
    architecture: ACTArchitecture,
    norm: str,
    x: ir.Value,
    compute: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """Add x + compute(x) with a norm: of x before `compute`, or of the sum."""
    hidden = architecture.hidden_size
    if architecture.norm_first:
        return graph.op("Add", x, compute(graph.layer_norm(norm, x, hidden, EPSILON)))
    return graph.layer_norm(norm, graph.op("Add", x, compute(x)), hidden, EPSILON)


def _feed_forward(graph: ModelBuilder, architecture: ACTArchitecture, x: ir.Value) -> ir.Value:
    hidden, inner = architecture.hidden_size, architecture.inner_size
    raised = graph.linear("linear1", x, hidden, inner, bias=True)
    raised = graph.op("Gelu", raised) if architecture.gelu else graph.op("Relu", raised)
    return graph.linear("linear2", raised, inner, hidden, bias=True)


# query --- in_proj --+
# keys ---- in_proj --+-- Attention -- out_proj -->
# values -- in_proj --+
def _attention(
    graph: ModelBuilder,
    architecture: ACTArchitecture,
    name: str,
    query: ir.Value,
    keys: ir.Value,
    values: ir.Value,
) -> ir.Value:
    """Add an attention of PyTorch without mask.

    query [1,Q,hidden], keys and values [1,S,hidden] -> [1,Q,hidden]. If query and keys are one value,
    their products are one.
    """
    hidden, heads = architecture.hidden_size, architecture.num_heads
    with graph.module(name):
        if query is keys:
            q, k = graph.split(_projected(graph, query, 0, 2, hidden), [hidden, hidden], axis=-1)
        else:
            q, k = _projected(graph, query, 0, 1, hidden), _projected(graph, keys, 1, 2, hidden)
        v = _projected(graph, values, 2, 3, hidden)
        split = (
            graph.transpose(graph.reshape(each, [0, 0, heads, hidden // heads]), (0, 2, 1, 3))
            for each in (q, k, v)
        )
        attended = graph.op("Attention", *split, scale=(hidden // heads) ** -0.5)
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [0, 0, hidden])
        return graph.linear("out_proj", attended, hidden, hidden, bias=True)


def _projected(graph: ModelBuilder, x: ir.Value, first: int, end: int, hidden: int) -> ir.Value:
    """Add the products of x with parts `first` to `end` - 1 of query, key and value."""
    weights = graph.weights
    matrix, bias = graph.full_name("in_proj_weight"), graph.full_name("in_proj_bias")
    weights.require(matrix, (3 * hidden, hidden))
    weights.require(bias, (3 * hidden,))
    rows, width = slice(first * hidden, end * hidden), (end - first) * hidden
    part = "qkv"[first:end]
    product = graph.weight(f"{matrix}.{part}", (hidden, width), lambda: weights.read(matrix)[rows].T)
    shift = graph.weight(f"{bias}.{part}", (width,), lambda: weights.read(bias)[rows])
    with graph.scope(f"{part}_proj"):
        return graph.op("Add", graph.op("MatMul", x, product), shift)
