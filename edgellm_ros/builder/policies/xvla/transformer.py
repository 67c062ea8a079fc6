# SPDX-License-Identifier: Apache-2.0
"""Graph of X-VLA's transformer, which predicts the clean actions.

All rows see all, so that rows of the prefix change with the actions: nothing of them is kept from one step to
the next. Of the last layer only the rows of the actions are computed.

Source of the model: LeRobot 0.6.1, policies/xvla/soft_transformer.py and action_hub.py.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import repeat
from edgellm_ros.builder.graph.graph import BOOL, FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.xvla.architecture import EPSILON, HEAD, XVLAArchitecture
from edgellm_ros.builder.policies.xvla.domain import domain_linear, domain_matrix
from edgellm_ros.builder.policies.xvla.prefix import action_positions, encoder_sizes
from edgellm_ros.builder.policies.xvla.rows import join_rows
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

LONGEST = math.log(100.0)  # of the periods of the time's sines


# trajectory -- action_encoder --+
# time -- Cos, Sin --------------+-- Concat -- blocks.0 -- ... -- norm -- action_decoder -- prediction
# state_features ----------------+      |
#                                   condition
def build_transformer(architecture: XVLAArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `action/model.onnx`.

    The graph takes n chunks of T actions of A values, all with one context.

    Inputs:
    - trajectory [n,T,A] fp32
    - time [1] fp32: 1 (noise) to 0 (actions)
    - condition [1,R,W], state_features [1,1,W] in the precision's type: outputs of the prefix

    Output: prediction [n,T,A] fp32, the clean actions. The values of grippers are from 0 to 1.
    """
    graph = ModelBuilder("action", weights, precision)
    width, steps, dim = architecture.hidden_size, architecture.horizon, architecture.action_dim
    trajectory = graph.input(names.TRAJECTORY, FLOAT, ["n", steps, dim])
    time = graph.input(names.TIME, FLOAT, [1])
    rows = architecture.prefix_rows + architecture.soft_prompts
    condition = graph.input(names.CONDITION, graph.dtype, [1, rows, width])
    state = graph.input(names.STATE_FEATURES, graph.dtype, [1, 1, width])
    samples = graph.op("Shape", trajectory, start=0, end=1)
    with graph.module(HEAD, nodes=""):
        x = _embed(graph, architecture, trajectory, time, state)
        x = join_rows(graph, x, repeat(graph, condition, samples, 3), width=width)
        for i in range(architecture.depth):
            with graph.module(f"blocks.{i}"):
                x = _block(graph, architecture, x, last=i == architecture.depth - 1)
        x = graph.layer_norm("norm", x, width, EPSILON)
        x = graph.to_fp32(domain_linear(graph, architecture, "action_decoder", x, (width, dim)))
    graph.output(_with_grippers(graph, architecture, x), names.PREDICTION, FLOAT, ["n", steps, dim])
    return graph


# trajectory -- MatMul --+
# time ------- MatMul ---+-- Add -- pos_emb -->
# state_features --------+
def _embed(
    graph: ModelBuilder,
    architecture: XVLAArchitecture,
    trajectory: ir.Value,
    time: ir.Value,
    state: ir.Value,
) -> ir.Value:
    """Embed actions [n,T,A] at a time [1] -> [n,T,W].

    Angles, sines and cosines are fp32 in every precision. The product of actions, state and time side by side
    is a sum of products.
    """
    sizes, dim, half = encoder_sizes(architecture), architecture.action_dim, architecture.time_size // 2
    first = dim + architecture.state_dim
    with graph.scope("action_encoder"):
        matrix = domain_matrix(
            graph, architecture, "action_encoder", sizes, range(dim), architecture.grippers
        )
        actions = graph.op("MatMul", graph.from_fp32(trajectory), matrix)
        frequencies = np.exp(-np.arange(half) * (LONGEST / half))[None]
        angle = graph.op("Mul", time, graph.constant(frequencies, FLOAT))
        sines = graph.op("Concat", graph.op("Cos", angle), graph.op("Sin", angle), axis=-1)
        # an odd number of values ends with a zero
        of_time = domain_matrix(graph, architecture, "action_encoder", sizes, range(first, first + 2 * half))
        moment = graph.op("Add", graph.op("MatMul", graph.from_fp32(sines), of_time), state)
        x = graph.op("Add", actions, moment)
    return graph.op("Add", x, action_positions(graph, architecture, range(architecture.horizon)))


# x --+-- norm1 -- attn --(+)--+-- norm2 -- mlp --(+)-->
#     +--------------------+   +------------------+
def _block(graph: ModelBuilder, architecture: XVLAArchitecture, x: ir.Value, last: bool) -> ir.Value:
    """Add a layer over all rows [n,S,W].

    Of the last one only the rows of the actions [n,T,W] are added.
    """
    width, inner = architecture.hidden_size, architecture.inner_size
    update = _attention(graph, architecture, graph.layer_norm("norm1", x, width, EPSILON), last)
    x = graph.op("Add", _actions(graph, architecture, x) if last else x, update)
    normed = graph.layer_norm("norm2", x, width, EPSILON)
    with graph.module("mlp"):
        raised = graph.op("Gelu", graph.linear("fc1", normed, width, inner, bias=True), approximate="tanh")
        return graph.op("Add", x, graph.linear("fc2", raised, inner, width, bias=True))


# x -- qkv -- Attention -- proj -->
def _attention(graph: ModelBuilder, architecture: XVLAArchitecture, x: ir.Value, last: bool) -> ir.Value:
    """Add attention among all rows [n,S,W].

    In the last layer only the rows of the actions attend.
    """
    width, heads = architecture.hidden_size, architecture.heads
    head_dim = width // heads
    with graph.module("attn"):
        q, k, v = graph.split(graph.linear("qkv", x, width, 3 * width, bias=True), [width] * 3, axis=-1)
        q = _actions(graph, architecture, q) if last else q
        parts = (
            graph.transpose(graph.reshape(part, [0, -1, heads, head_dim]), (0, 2, 1, 3)) for part in (q, k, v)
        )
        attended = graph.op("Attention", *parts, scale=head_dim**-0.5)
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [0, -1, width])
        return graph.linear("proj", attended, width, width, bias=True)


def _actions(graph: ModelBuilder, architecture: XVLAArchitecture, x: ir.Value) -> ir.Value:
    """Add a cut of the rows of the actions, [n,S,W] -> [n,T,W]."""
    end = graph.constant([architecture.horizon])
    return graph.op("Slice", x, graph.constant([0]), end, graph.constant([1]))


def _with_grippers(graph: ModelBuilder, architecture: XVLAArchitecture, x: ir.Value) -> ir.Value:
    """Make the values of grippers from 0 to 1, [n,T,A] fp32.

    The model does not see them: its weights for them are 0.
    """
    if not architecture.grippers:
        return x
    chosen = np.isin(np.arange(architecture.action_dim), architecture.grippers)
    return graph.op("Where", graph.constant(chosen, BOOL), graph.op("Sigmoid", x), x)
