# SPDX-License-Identifier: Apache-2.0
"""Graph of SmolVLA's prefix: keys and values of images, task and state, by layer.

Of the last layer only the keys and values are computed: nothing reads its result.

Source of the model: LeRobot 0.4.4, modeling_smolvla.py (VLAFlowMatching.embed_prefix) and
smolvlm_with_expert.py (SmolVLMWithExpertModel).
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, INT64, Dim
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.prefix_layers import attend_rows
from edgellm_ros.builder.policies.rope import first_rows, rope_table
from edgellm_ros.builder.policies.smolvla.architecture import (
    EMBEDDING,
    EXPERT,
    TEXT_MODEL,
    SmolVLAArchitecture,
)
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

END = 2**31 - 1


# image_embeds ----------+
# token_ids -- Gather ---+-- Concat -- layers.0 -- ... -- layers.L-1
# state -- state_proj ---+                |                   |
#                                 context_key_0,      context_key_L-1,
#                                 context_value_0     context_value_L-1
def build_prefix(architecture: SmolVLAArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `prefix/model.onnx`.

    Inputs:
    - image_embeds [I,H] in the precision's type: the rows of all images
    - token_ids [L] i64: of the task
    - state [1,D] fp32: normalised, filled up with zeros

    Outputs: for each layer context_key_i and context_value_i [1,Hkv,S,D] in the precision's type, S = I+L+1:
    what the expert's layer i attends to. In layers with cross-attention these are the expert's projections of
    the keys and values, which do not depend on the actions.

    Images and task attend to each other both ways, the state to them and itself.
    """
    graph = ModelBuilder("prefix", weights, precision)
    llm, hidden = architecture.llm, architecture.llm.hidden_size
    images = graph.input(names.IMAGE_EMBEDS, graph.dtype, ["I", hidden])
    tokens = graph.input(names.TOKEN_IDS, INT64, ["L"])
    state = graph.input(names.STATE, FLOAT, [1, architecture.state_dim])
    with graph.scope("embed"):
        words = graph.op("Gather", graph.tensor(EMBEDDING, llm.vocab_size, hidden), tokens, axis=0)
        own = graph.linear(
            "model.state_proj", graph.from_fp32(state), architecture.state_dim, hidden, bias=True
        )
        x = graph.op("Concat", images, words, own, axis=0)
        x = graph.op("Unsqueeze", x, graph.constant([0]))
    rows = graph.op("Shape", x, start=1, end=2)
    rope = first_rows(graph, rope_table(graph, llm.head_dim, architecture.max_prefix_rows), rows)
    mask = _mask(graph, rows)
    for i in range(llm.num_hidden_layers):
        last = i == llm.num_hidden_layers - 1
        with graph.module(f"{TEXT_MODEL}.layers.{i}", nodes=f"layers.{i}"):
            normed = graph.rms_norm("input_layernorm", x, hidden, architecture.epsilon)
            update, keys, values = attend_rows(graph, llm, normed, rope, mask, last)
        if not architecture.self_attention[i]:
            keys, values = _projected(graph, architecture, i, keys, values)
        shape: list[Dim] = [1, llm.num_key_value_heads, "S", llm.head_dim]
        graph.output(keys, names.context_key(i), graph.dtype, shape)
        graph.output(values, names.context_value(i), graph.dtype, shape)
        if update is None:
            break
        with graph.module(f"{TEXT_MODEL}.layers.{i}", nodes=f"layers.{i}"):
            x = graph.op("Add", x, update)
            normed = graph.rms_norm("post_attention_layernorm", x, hidden, architecture.epsilon)
            x = graph.op("Add", x, graph.swiglu("mlp", normed, hidden, architecture.intermediate_size))
    return graph


def _mask(graph: ModelBuilder, rows: ir.Value) -> ir.Value:
    """Make the mask [1,1,S,S] of S = `rows` [1].

    The last row, the state, is seen by itself only.
    """
    with graph.scope("mask"):
        zero, one = graph.constant(0), graph.constant(1)
        numbers = graph.op("Range", zero, graph.op("Squeeze", rows, graph.constant([0])), one)
        # not from `rows`, which is on the host: a CUDA graph cannot have a copy from there
        last = graph.op("Slice", numbers, graph.constant([-1]), graph.constant([END]), graph.constant([0]))
        before = graph.op("Less", numbers, last)
        state = graph.op("Not", before)
        seen = graph.op("Unsqueeze", before, graph.constant([0]))
        sees_all = graph.op("Unsqueeze", state, graph.constant([1]))
        return graph.op("Unsqueeze", graph.op("Or", seen, sees_all), graph.constant([0, 1]))


def _projected(
    graph: ModelBuilder, architecture: SmolVLAArchitecture, layer: int, *cache: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Add the expert's projections of a layer's keys and values.

    [1,Hkv,S,D] -> the same shape.
    """
    width, llm = architecture.kv_width, architecture.llm
    results = []
    with graph.module(f"{EXPERT}.layers.{layer}.self_attn", nodes=f"expert.layers.{layer}"):
        for name, rows in zip(("k_proj", "v_proj"), cache, strict=True):
            flat = graph.reshape(graph.transpose(rows, (0, 2, 1, 3)), [0, 0, width])
            projected = graph.linear(name, flat, width, width)
            heads = graph.reshape(projected, [0, 0, llm.num_key_value_heads, llm.head_dim])
            results.append(graph.transpose(heads, (0, 2, 1, 3)))
    return results[0], results[1]
