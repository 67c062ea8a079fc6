# SPDX-License-Identifier: Apache-2.0
"""Graph of the action expert: velocity of the flow from noise to a trajectory.

Each layer attends to the KV cache of one of the language model's attention layers, and to the trajectory
itself. The caches are read in place, never copied or concatenated: scores over the cache and over the
trajectory are two products, one softmax normalises both, and two products apply the values. All n
trajectories of a request share its cache and its positions; their queries are stacked, so that the cache is
read once for all of them.

Source of the method: flow matching (arXiv 2210.02747) with an expert beside a language model, as in pi0
(arXiv 2410.24164) and Alpamayo-R1 (arXiv 2511.00088).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.expert_config import ExpertArchitecture
from edgellm_ros.builder.graph import FLOAT, INT64
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.config import LanguageModelConfig

MASKED = -6e4  # added to a score, makes its share of the softmax exactly 0 in every precision; fits fp16


# trajectory -- in_proj --(+)-- layers.0 -- ... -- layers.L-1 -- norm -- out_proj -- velocity
#                          |      |  |               |  |
# time -- sin,cos -- time_mlp    caches             caches
def build_expert(
    architecture: ExpertArchitecture,
    llm: LanguageModelConfig,
    weights: Weights,
    precision: str,
    capacity: int,
) -> ModelBuilder:
    """Build `action/model.onnx`; `llm`: the language model whose KV caches it reads.

    B requests, n trajectories of each, T steps, A values per step.

    Inputs:
    - trajectory [B*n,T,A] fp32: the trajectories of one request lie next to each other
    - time [1] fp32: 0 (noise) to 1 (action)
    - rope_cos, rope_sin [B,T,R/2] fp32: one row per step, R = the rotated values of a head
    - kv_length [B] i64: rows of the cache that are filled
    - key_cache_i, value_cache_i [B,Hkv,C,D], C = `capacity`, in the precision's type: only read; i as in the
      language model, for the caches that a layer of the expert reads

    Output: velocity [B*n,T,A] fp32.
    """
    graph = ModelBuilder("action", weights, precision)
    space, hidden, epsilon = architecture.action_space, architecture.hidden_size, architecture.rms_norm_eps
    layers, kv_heads, head_dim = (
        architecture.num_hidden_layers,
        architecture.num_key_value_heads,
        architecture.head_dim,
    )

    trajectory = graph.input(names.TRAJECTORY, FLOAT, ["Bn", space.horizon, space.dim])
    time = graph.input(names.TIME, FLOAT, [1])
    rope = graph.rope_rows(space.horizon, llm.rope.rotary_dim // 2), llm.rope.rotary_dim
    length = graph.input(names.KV_LENGTH, INT64, ["B"])
    read = architecture.kv_caches(llm)
    shared = sorted(set(read))
    caches = dict(zip(shared, graph.caches(shared, kv_heads, capacity, head_dim), strict=True))

    x = graph.linear("in_proj", graph.from_fp32(trajectory), space.dim, hidden, bias=True)
    x = graph.op("Add", x, _time_embedding(graph, architecture, time))
    batch, bias = graph.op("Shape", length), _cache_bias(graph, length, capacity)
    for i in range(layers):
        with graph.module(f"layers.{i}"):
            normed = graph.rms_norm("input_layernorm", x, hidden, epsilon)
            cache = caches[read[i]]
            found = _attention(graph, architecture, normed, rope, cache, bias, batch, capacity)
            x = graph.op("Add", x, found)
            normed = graph.rms_norm("post_attention_layernorm", x, hidden, epsilon)
            x = graph.op("Add", x, graph.swiglu("mlp", normed, hidden, architecture.intermediate_size))
    x = graph.rms_norm("norm", x, hidden, epsilon)
    velocity = graph.to_fp32(graph.linear("out_proj", x, hidden, space.dim, bias=True))
    graph.output(velocity, names.VELOCITY, FLOAT, ["Bn", space.horizon, space.dim])
    return graph


# time -- Mul 2*pi/period --+-- Sin --+
#                           +-- Cos -- Concat -- time_mlp.0 -- SiLU -- time_mlp.2 -->
def _time_embedding(graph: ModelBuilder, architecture: ExpertArchitecture, time: ir.Value) -> ir.Value:
    """Embed time [1] -> [1,hidden].

    Angles, sines and cosines are fp32 in every precision.
    """
    hidden, size = architecture.hidden_size, architecture.time_embedding_dim
    graph.weights.require("time_mlp.0.weight", (hidden, size))
    low, high = architecture.time_min_period, architecture.time_max_period
    frequency = 2 * math.pi / (low * (high / low) ** np.linspace(0.0, 1.0, size // 2))
    with graph.scope("time"):
        time = graph.op("Unsqueeze", time, graph.constant([-1]))
        angle = graph.op("Mul", time, graph.constant(frequency, FLOAT))
        features = graph.op("Concat", graph.op("Sin", angle), graph.op("Cos", angle), axis=-1)
        raised = graph.linear("time_mlp.0", graph.from_fp32(features), size, hidden, bias=True)
        raised = graph.op("Mul", raised, graph.op("Sigmoid", raised))
        return graph.linear("time_mlp.2", raised, hidden, hidden, bias=True)


def _cache_bias(graph: ModelBuilder, length: ir.Value, capacity: int) -> ir.Value:
    """Make a bias of scores [B,1,1,C] from lengths [B].

    It is 0 for filled cache rows and MASKED for the others.
    """
    with graph.scope("cache_bias"):
        length = graph.op("Unsqueeze", length, graph.constant([1, 2, 3]))
        filled = graph.op("Less", graph.constant(np.arange(capacity)), length)
        zero, masked = graph.constant(0.0, graph.dtype), graph.constant(MASKED, graph.dtype)
        return graph.op("Where", filled, zero, masked)


# q [B,Hkv,n*G*T,D] -- MatMul cached keys^T -- Add bias -- [B,Hkv,n,G*T,C] --+
# q [B,Hkv,n,G*T,D] -- MatMul own keys^T ----------------- [B,Hkv,n,G*T,T] -- Concat -- Softmax -- Split
#                                                                                                   |  |
# Add <--+-- MatMul cached values <-- [B,Hkv,n*G*T,C] ----------------------------------------------+  |
#  |     +-- MatMul own values <----- [B,Hkv,n,G*T,T] -------------------------------------------------+
#  +-- Transpose [B,n,T,Hkv,G,D] -- Reshape [B*n,T,heads*D] -- o_proj -->
def _attention(
    graph: ModelBuilder,
    architecture: ExpertArchitecture,
    x: ir.Value,
    rope: tuple[tuple[ir.Value, ir.Value], int],
    cache: tuple[ir.Value, ir.Value],
    bias: ir.Value,
    batch: ir.Value,
    capacity: int,
) -> ir.Value:
    """Add attention of all steps to the cache and to each other.

    x [B*n,T,hidden] -> the same shape; rope: cos and sin, and the rotated values of a head. G query heads
    share a key head. Rows that share keys lie next to each other, so that each product is one MatMul,
    whatever n is.
    """
    hidden, head_dim, epsilon = architecture.hidden_size, architecture.head_dim, architecture.rms_norm_eps
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    group, steps = heads // kv_heads, architecture.action_space.horizon
    cos_sin, rotary_dim = rope
    part = {"rotary_embedding_dim": rotary_dim} if rotary_dim < head_dim else {}
    with graph.module("self_attn", nodes="attn"):

        def project(name: str, group: int) -> ir.Value:
            """Project to [B,Hkv*n*group,T,D]; RoPE treats samples as additional heads."""
            rows = graph.linear(name, x, hidden, kv_heads * group * head_dim)
            sizes = graph.constant([-1, steps, kv_heads, group, head_dim])
            rows = graph.op("Reshape", rows, graph.op("Concat", batch, sizes, axis=0))
            return graph.reshape(graph.transpose(rows, 0, 3, 1, 4, 2, 5), [0, -1, steps, head_dim])

        q, k, v = project("q_proj", group), project("k_proj", 1), project("v_proj", 1)
        q = graph.op("RotaryEmbedding", graph.rms_norm("q_norm", q, head_dim, epsilon), *cos_sin, **part)
        k = graph.op("RotaryEmbedding", graph.rms_norm("k_norm", k, head_dim, epsilon), *cos_sin, **part)
        q = graph.op("Mul", q, graph.constant(head_dim**-0.5, graph.dtype))
        k, v = (graph.reshape(rows, [0, kv_heads, -1, steps, head_dim]) for rows in (k, v))

        with graph.scope("cached"):
            rows = graph.reshape(q, [0, kv_heads, -1, head_dim])
            scores = graph.op("MatMul", rows, graph.transpose(cache[0], 0, 1, 3, 2))
            scores = graph.reshape(graph.op("Add", scores, bias), [0, 0, -1, group * steps, capacity])
        with graph.scope("own"):
            rows = graph.reshape(q, [0, kv_heads, -1, group * steps, head_dim])
            own_scores = graph.op("MatMul", rows, graph.transpose(k, 0, 1, 2, 4, 3))
        share = graph.op("Softmax", graph.op("Concat", scores, own_scores, axis=-1), axis=-1)
        share, own_share = graph.split(share, [capacity, steps], axis=-1)
        with graph.scope("cached"):
            attended = graph.op("MatMul", graph.reshape(share, [0, 0, -1, capacity]), cache[1])
            attended = graph.reshape(attended, [0, 0, -1, group * steps, head_dim])
        with graph.scope("own"):
            attended = graph.op("Add", attended, graph.op("MatMul", own_share, v))
        attended = graph.reshape(attended, [0, 0, -1, group, steps, head_dim])
        attended = graph.reshape(graph.transpose(attended, 0, 2, 4, 1, 3, 5), [-1, steps, heads * head_dim])
        return graph.linear("o_proj", attended, heads * head_dim, hidden)
