# SPDX-License-Identifier: Apache-2.0
"""Graph of GR00T's diffusion transformer, which computes velocities.

Layers of two kinds alternate. In one, state and actions attend to the rows of text or of images; in the other
to each other, both ways.

Source of the model: LeRobot 0.6.1, policies/groot/groot_n1_7.py (GR00TN17ActionHead,
MultiEmbodimentActionEncoder) and action_head/cross_attention_dit.py (AlternateVLDiT).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import repeat
from edgellm_ros.builder.graph.graph import FLOAT, Dim
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.standard.recurrent import silu
from edgellm_ros.builder.policies.groot.architecture import HEAD, GrootArchitecture
from edgellm_ros.builder.policies.groot.layers import (
    embodiment_linear,
    embodiment_linears,
    embodiment_mlp,
    feed_forward,
    join_heads,
    plain_norm,
    self_attention,
    sines,
    split_heads,
)
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

LAST_EPSILON = 1e-6
TIME_CHANNELS = 256
LONGEST = math.log(10000.0)  # of the periods of the time's sines


# trajectory -- action_encoder --+
# state_features ----------------+-- Concat -- transformer_blocks.0 -- ... -- proj_out -- action_decoder
# time -- timestep_encoder ------------------------+ (scale and shift of norms)
#                                               context
def build_dit(architecture: GrootArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `action/model.onnx`.

    The graph takes n chunks of T actions of A values, all with one context.

    Inputs:
    - trajectory [n,T,A] fp32
    - time [1] fp32: 0 (noise) to 1 (action); the model knows whole times of a thousand
    - state_features, context_key_i, context_value_i: outputs of the prefix

    Output: velocity [n,T,A] fp32.
    """
    graph = ModelBuilder("action", weights, precision)
    sizes, steps, dim = architecture.dit, architecture.horizon, architecture.action_dim
    trajectory = graph.input(names.TRAJECTORY, FLOAT, ["n", steps, dim])
    time = graph.input(names.TIME, FLOAT, [1])
    state = graph.input(names.STATE_FEATURES, graph.dtype, [1, 1, sizes.width])
    context = {}
    for i in architecture.context_layers:
        rows = "L" if architecture.attends_to_text(i) else "I"
        shape: list[Dim] = [1, sizes.heads, rows, sizes.head_dim]
        context[i] = [
            graph.input(name(i), graph.dtype, shape) for name in (names.context_key, names.context_value)
        ]
    with graph.scope("time"):
        share = graph.constant(architecture.time_steps, FLOAT)
        # a hundredth for times whose product in fp32 is just below a whole number
        hundredth = graph.constant(0.01, FLOAT)
        index = graph.op("Floor", graph.op("Add", graph.op("Mul", time, share), hundredth))
    with graph.module(HEAD, nodes=""):
        actions = _embed(graph, architecture, trajectory, index)
        samples = graph.op("Shape", trajectory, start=0, end=1)
        x = graph.op("Concat", repeat(graph, state, samples, 3), actions, axis=1)
        with graph.module("model", nodes=""):
            moment = _time(graph, architecture, index)
            for i in range(sizes.layers):
                with graph.module(f"transformer_blocks.{i}"):
                    normed = _adaptive_norm(graph, "norm1.linear", x, moment, sizes.width)
                    if i in context:
                        update = _cross_attention(graph, architecture, normed, context[i])
                    else:
                        update = self_attention(graph, normed, sizes)
                    x = graph.op("Add", x, update)
                    update = feed_forward(graph, plain_norm(graph, x, sizes.width), sizes.width)
                    x = graph.op("Add", x, update)
            x = graph.op("Slice", x, graph.constant([1]), graph.constant([steps + 1]), graph.constant([1]))
            x = _adaptive_norm(graph, "proj_out_1", x, moment, sizes.width, last=True)
            x = graph.linear("proj_out_2", x, sizes.width, architecture.inner_size, bias=True)
        inner = architecture.inner_size
        x = embodiment_mlp(graph, architecture, "action_decoder", x, (inner, inner, dim))
    graph.output(graph.to_fp32(x), names.VELOCITY, FLOAT, ["n", steps, dim])
    return graph


# trajectory -- W1 --+-- W2 -- Swish -- W3 --(+)-->
# time -- sines -----+            position_embedding
def _embed(
    graph: ModelBuilder, architecture: GrootArchitecture, trajectory: ir.Value, index: ir.Value
) -> ir.Value:
    """Embed actions [n,T,A] at a time [1] -> [n,T,W].

    Angles, sines and cosines are fp32.
    """
    width, steps = architecture.dit.width, architecture.horizon
    half = width // 2
    with graph.module("action_encoder"):
        sizes = architecture.action_dim, width
        actions = embodiment_linear(graph, architecture, "W1", graph.from_fp32(trajectory), sizes)
        frequencies = np.exp(-np.arange(half) * (LONGEST / half))
        moment = graph.from_fp32(graph.op("Concat", *sines(graph, index, frequencies), axis=-1))
        parts = {"actions": (actions, width), "time": (moment, width)}
        x = embodiment_linears(graph, architecture, "W2", parts, width)
        x = embodiment_linear(graph, architecture, "W3", silu(graph, x), (width, width))
    if not architecture.positions:
        return x
    name, weights = graph.full_name("position_embedding.weight"), graph.weights
    weights.require(name, (architecture.positions, width))
    return graph.op("Add", x, graph.weight(name, (steps, width), lambda: weights.read(name)[:steps]))


# time -- Cos, Sin -- linear_1 -- SiLU -- linear_2 -- SiLU -->
def _time(graph: ModelBuilder, architecture: GrootArchitecture, index: ir.Value) -> ir.Value:
    """Embed a time [1] -> [1,W], as the norms of all layers take it."""
    width, half = architecture.dit.width, TIME_CHANNELS // 2
    with graph.module("timestep_encoder.timestep_embedder", nodes="timestep_encoder"):
        sine, cosine = sines(graph, index, np.exp(-np.arange(half) * (LONGEST / (half - 1))))
        x = graph.from_fp32(graph.op("Concat", cosine, sine, axis=-1))
        x = silu(graph, graph.linear("linear_1", x, TIME_CHANNELS, width, bias=True))
        return silu(graph, graph.linear("linear_2", x, width, width, bias=True))


# x -- LayerNorm -- Mul (1 + scale) -- Add (shift) -->
def _adaptive_norm(
    graph: ModelBuilder, linear: str, x: ir.Value, moment: ir.Value, width: int, last: bool = False
) -> ir.Value:
    """Add a LayerNorm whose scale and shift depend on the time.

    last: the norm after all layers, which has the shift first, and an epsilon of its own.
    """
    with graph.scope("norm_out" if last else "norm1"):
        values = graph.split(
            graph.linear(linear, moment, width, 2 * width, bias=True), [width, width], axis=-1
        )
        shift, scale = values if last else reversed(values)
        normed = plain_norm(graph, x, width, LAST_EPSILON) if last else plain_norm(graph, x, width)
        scaled = graph.op("Mul", normed, graph.op("Add", scale, graph.constant(1, graph.dtype)))
        return graph.op("Add", scaled, shift)


# x -- to_q -- Attention -- to_out.0 -->
#          context --+
def _cross_attention(
    graph: ModelBuilder, architecture: GrootArchitecture, x: ir.Value, context: list[ir.Value]
) -> ir.Value:
    """Add attention of all rows [n,T+1,W] to the context.

    The rows of all samples are the queries of one sequence, so that the context is not repeated.
    """
    sizes, rows = architecture.dit, architecture.horizon + 1
    width = sizes.width
    with graph.module("attn1", nodes="attn"):
        q = graph.reshape(graph.linear("to_q", x, width, width, bias=True), [1, -1, width])
        attended = graph.op("Attention", split_heads(graph, q, sizes), *context, scale=sizes.head_dim**-0.5)
        attended = graph.reshape(join_heads(graph, attended, sizes), [-1, rows, width])
        return graph.linear("to_out.0", attended, width, width, bias=True)
