# SPDX-License-Identifier: Apache-2.0
"""Graph of a draft head for ONNX Runtime's CUDA provider.

It is built in the way of `decoder_cuda.py`.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.cuda_step import CudaStep
from edgellm_ros.builder.decoder_cuda import add_norm, attention
from edgellm_ros.builder.draft.head import DraftHead
from edgellm_ros.builder.draft.layout import MODULE
from edgellm_ros.builder.graph import DTYPES, FLOAT, INT64
from edgellm_ros.builder.layers import Cache, ModelBuilder
from edgellm_ros.builder.llm_graph import llm_outputs
from edgellm_ros.builder.lm_head import LMHead
from edgellm_ros.engine_directory import binding_names as names


def build_cuda_draft(
    head: DraftHead, lm_head: LMHead, precision: str, capacity: int, only_chains: bool = False
) -> ModelBuilder:
    """Build `draft/model.cuda.onnx`, or without a mask `draft/model.chain.cuda.onnx`.

    It has the inputs and outputs of `build_draft`, except for those that `build_cuda_decoder` has in other
    forms; it takes attention_mask as `llm/verify.cuda.onnx` does.

    The logits are of the graph's type in fp32 and fp16. The tokens are [B,S,H] between the layers: a Reshape
    before the output next_hidden_states would be a copy in each level of a draft, as a Cast of the logits is.
    """
    graph = ModelBuilder("draft", head.weights, precision)
    decoder, runner = head.decoder, head.decoder.runner
    hidden, epsilon = runner.hidden_size, decoder.epsilon
    step = CudaStep(graph, runner, capacity, tree=not only_chains, flat=False)
    last_token_ids = graph.input(names.LAST_TOKEN_IDS, INT64, ["B", "N"])
    layers = range(runner.num_hidden_layers)
    caches = graph.caches(layers, runner.num_key_value_heads, capacity, runner.head_dim)
    states = graph.input(names.HIDDEN_STATES, graph.dtype, ["B", "S", hidden])

    presents: list[Cache] = []
    embeds, x = step.embeds, states
    update: ir.Value | None = None
    with graph.module(MODULE, nodes=""):
        for i in layers:
            with graph.module(f"layers.{i}"):
                if i == 0:
                    normed = graph.rms_norm("hidden_norm", x, hidden, epsilon)
                    x = normed if head.norm_before_residual else x
                    embeds = graph.rms_norm("input_layernorm", embeds, hidden, epsilon)
                    normed = graph.op("Concat", embeds, normed, axis=-1)
                else:
                    x, normed = add_norm(graph, "input_layernorm", x, update, hidden, epsilon)
                width = hidden if i else 2 * hidden
                attended, present = attention(decoder, step, None, normed, caches[i], width)
                presents.append(present)
                x, normed = add_norm(graph, "post_attention_layernorm", x, attended, hidden, epsilon)
                inner, bias = decoder.intermediate_size, decoder.mlp_bias
                update = graph.swiglu("mlp", normed, hidden, inner, bias)
        x, normed = add_norm(graph, "norm", x, update, hidden, epsilon)
    last = graph.rows(normed, last_token_ids, hidden)
    following = normed if head.feeds_back_normed_state else x
    graph.output(following, names.NEXT_HIDDEN_STATES, graph.dtype, ["B", "S", hidden])
    logits, logits_type = lm_head.product(graph, last), graph.dtype
    if graph.dtype == DTYPES["bf16"]:  # NumPy has no such type
        logits, logits_type = graph.to_fp32(logits), FLOAT
    llm_outputs(graph, runner, capacity, lm_head, logits, presents, {}, logits_type)
    return graph
