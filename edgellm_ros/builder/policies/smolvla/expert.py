# SPDX-License-Identifier: Apache-2.0
"""Graph of SmolVLA's action expert: velocity of the flow from noise to actions.

Layers of two kinds alternate. In one, actions attend to the prefix, and to themselves and the actions before
them; in the other to the prefix alone, with positions that count from the first action.

Source of the model: LeRobot 0.4.4, modeling_smolvla.py (VLAFlowMatching.embed_suffix and denoise_step) and
smolvlm_with_expert.py (SmolVLMWithExpertModel).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import StepHeads, repeat
from edgellm_ros.builder.graph.graph import BOOL, FLOAT, Dim
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.expert_layers import attend_rows_and_context, embed_actions_and_times
from edgellm_ros.builder.policies.rope import CosSin, rope_table, rows_from
from edgellm_ros.builder.policies.smolvla.architecture import EXPERT, SmolVLAArchitecture
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

Context = tuple[ir.Value, ir.Value]  # keys and values [1,Hkv,S,D]


# trajectory -- action_in_proj --(+)-- action_time_mlp -- layers.0 -- ... -- action_out_proj -- velocity
# time -- sin, cos ---------------+                          |
#                                                         context
def build_expert(architecture: SmolVLAArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `action/model.onnx`.

    The graph takes n chunks of T actions of A values, all with one context.

    Inputs:
    - trajectory [n,T,A] fp32
    - time [T] fp32: of each action, 1 (noise) to 0 (action)
    - context_key_i, context_value_i [1,Hkv,S,D] in the precision's type: outputs of the prefix

    Output: velocity [n,T,A] fp32.
    """
    graph = ModelBuilder("action", weights, precision)
    llm, hidden = architecture.llm, architecture.expert_hidden_size
    steps, dim, epsilon = architecture.horizon, architecture.action_dim, architecture.epsilon
    trajectory = graph.input(names.TRAJECTORY, FLOAT, ["n", steps, dim])
    time = graph.input(names.TIME, FLOAT, [steps])
    shape: list[Dim] = [1, llm.num_key_value_heads, "S", llm.head_dim]
    context = [
        (
            graph.input(names.context_key(i), graph.dtype, shape),
            graph.input(names.context_value(i), graph.dtype, shape),
        )
        for i in range(llm.num_hidden_layers)
    ]
    samples = graph.op("Shape", trajectory, start=0, end=1)
    rows = graph.op("Shape", context[0][0], start=2, end=3)
    table = rope_table(graph, llm.head_dim, architecture.max_prefix_rows + steps)
    behind, alone = (rows_from(graph, table, first, steps) for first in (rows, graph.constant([0])))
    mask = _mask(graph, rows, steps)
    sizes = StepHeads(hidden, steps, llm.num_attention_heads, llm.num_key_value_heads, llm.head_dim)
    periods = architecture.min_period, architecture.max_period
    with graph.module("model", nodes="embed"):
        x = embed_actions_and_times(graph, trajectory, time, periods, dim, hidden)
    for i, (keys, values) in enumerate(context):
        with graph.module(f"{EXPERT}.layers.{i}", nodes=f"layers.{i}"):
            normed = graph.rms_norm("input_layernorm", x, hidden, epsilon)
            if architecture.self_attention[i]:
                repeated = tuple(repeat(graph, each, samples, 4) for each in (keys, values))
                update = attend_rows_and_context(
                    graph, normed, sizes, rope=behind, context=repeated, visible=(mask,), samples=samples
                )
            else:
                update = _cross_attention(graph, architecture, normed, alone, (keys, values), samples)
            x = graph.op("Add", x, update)
            normed = graph.rms_norm("post_attention_layernorm", x, hidden, epsilon)
            update = graph.swiglu("mlp", normed, hidden, architecture.expert_intermediate_size)
            x = graph.op("Add", x, update)
    with graph.module(EXPERT, nodes=""):
        x = graph.rms_norm("norm", x, hidden, epsilon)
    with graph.module("model", nodes=""):
        velocity = graph.to_fp32(graph.linear("action_out_proj", x, hidden, dim, bias=True))
    graph.output(velocity, names.VELOCITY, FLOAT, ["n", steps, dim])
    return graph


def _mask(graph: ModelBuilder, rows: ir.Value, steps: int) -> ir.Value:
    """Make the mask [1,1,T,T+S] of S = `rows` [1].

    An action sees itself, those before it, and the prefix of S rows.
    """
    with graph.scope("mask"):
        own = graph.constant(np.tri(steps, dtype=bool), BOOL)
        size = graph.op("Concat", graph.constant([steps]), rows, axis=0)
        prefix = graph.op("Expand", graph.constant([[True]], BOOL), size)
        return graph.op("Unsqueeze", graph.op("Concat", own, prefix, axis=1), graph.constant([0, 1]))


# x -- q_proj -- RotaryEmbedding -- Attention -- o_proj -->
#                             context --+
def _cross_attention(
    graph: ModelBuilder,
    architecture: SmolVLAArchitecture,
    x: ir.Value,
    rope: CosSin,
    context: Context,
    samples: ir.Value,
) -> ir.Value:
    """Add attention of all actions [n,T,hidden] to the prefix.

    The actions of all samples are the queries of one sequence, so that the context is not repeated.
    """
    llm, hidden, steps = architecture.llm, architecture.expert_hidden_size, architecture.horizon
    heads, head_dim = llm.num_attention_heads, llm.head_dim
    with graph.module("self_attn", nodes="attn"):
        q = graph.reshape(graph.linear("q_proj", x, hidden, heads * head_dim), [0, steps, heads, head_dim])
        size = graph.op("Concat", samples, graph.constant([1, 1]), axis=0)
        cos_sin = [graph.op("Expand", each, size) for each in rope]
        q = graph.op("RotaryEmbedding", graph.transpose(q, (0, 2, 1, 3)), *cos_sin)
        q = graph.reshape(graph.transpose(q, (0, 2, 1, 3)), [1, -1, heads, head_dim])
        q = graph.transpose(q, (0, 2, 1, 3))
        attended = graph.op("Attention", q, *context, scale=head_dim**-0.5)
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [-1, steps, heads * head_dim])
        return graph.linear("o_proj", attended, heads * head_dim, hidden)
