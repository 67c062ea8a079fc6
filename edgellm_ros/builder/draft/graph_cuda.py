# SPDX-License-Identifier: Apache-2.0
"""Graph of a draft head for ONNX Runtime's CUDA provider.

The graph is built as in `lowering/onnxruntime/decoder.py`.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.draft.graph import project
from edgellm_ros.builder.draft.head import DraftHead, JoinedAttention, Projection
from edgellm_ros.builder.draft.layout import MODULE
from edgellm_ros.builder.graph.graph import DTYPES, FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.llm_graph import llm_outputs
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.lowering.onnxruntime.blocks import OnnxRuntimeBlocks
from edgellm_ros.engine_directory import binding_names as names


def build_cuda_draft(
    head: DraftHead, lm_head: LMHead, precision: str, capacity: int, only_chains: bool = False
) -> ModelBuilder:
    """Build `draft/model.cuda.onnx`, or without a mask `draft/model.chain.cuda.onnx`.

    The graph has the inputs and outputs of `build_draft`, except for those that `build_onnxruntime_llm` has
    in other forms; it takes attention_mask as `llm/verify.cuda.onnx` does.

    The logits are of the graph's type in fp32 and fp16. The tokens are [B,S,H] between the layers: a Reshape
    before the output next_hidden_states would be a copy in each level of a draft, as a Cast of the logits is.
    """
    graph = ModelBuilder("draft", head.weights, precision)
    llm = head.decoder.config
    hidden = llm.hidden_size
    blocks = OnnxRuntimeBlocks(graph, head.decoder, capacity, tree=not only_chains, flat=False)
    states = graph.input(names.HIDDEN_STATES, graph.dtype, ["B", "S", hidden])

    residuals = [(f"layers.{i}", each) for i, layer in enumerate(head.decoder.layers) for each in layer]
    x: ir.Value = states
    update: ir.Value | None = None  # what is still to be added to x
    with graph.module(MODULE, nodes=""):
        if isinstance(head.entry, Projection):
            _, embeds = blocks.add_norm("embedding_norm", blocks.step.embeds, None)
            _, normed = blocks.add_norm("hidden_norm", states, None)
            x = project(graph, head.entry, embeds, normed, hidden)
        else:
            assert isinstance(head.entry, JoinedAttention)
            module, first = residuals.pop(0)
            with graph.module(module):
                _, normed = blocks.add_norm("hidden_norm", states, None)
                x = normed if head.entry.norm_before_residual else x
                _, embeds = blocks.add_norm(first.norm, blocks.step.embeds, None)
                update = blocks.block(first, graph.op("Concat", embeds, normed, axis=-1))
        for module, residual in residuals:
            with graph.module(module):
                x, normed = blocks.add_norm(residual.norm, x, update)
                update = blocks.block(residual, normed)
        x, normed = blocks.add_norm("norm", x, update)
    last = graph.rows(normed, blocks.last_token_ids, hidden)
    following = normed if head.feeds_back_normed_state else x
    graph.output(following, names.NEXT_HIDDEN_STATES, graph.dtype, ["B", "S", hidden])
    logits, logits_type = lm_head.product(graph, last), graph.dtype
    if graph.dtype == DTYPES["bf16"]:  # NumPy has no such type
        logits, logits_type = graph.to_fp32(logits), FLOAT
    llm_outputs(
        graph,
        llm,
        capacity=capacity,
        head=lm_head,
        logits=logits,
        presents=blocks.presents,
        hidden_states={},
        logits_type=logits_type,
    )
    return graph
