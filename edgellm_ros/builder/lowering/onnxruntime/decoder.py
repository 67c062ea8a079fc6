# SPDX-License-Identifier: Apache-2.0
"""Graph of a decoder for ONNX Runtime alone: `llm/model.cuda.onnx`.

With `LLMOptions.cpu` the graph is for its CPU provider: `llm/model.cpu.onnx` of an engine with quantised
weights. Products and LM head are then those of `llm/model.onnx`.

The graph has the same weights as `llm/model.onnx` and needs fewer kernels. Beside ONNX's operators it uses
some of ONNX Runtime's own (domain com.microsoft), which TensorRT lacks: GroupQueryAttention in half
precision, SkipSimplifiedLayerNormalization for a sum and its RMSNorm, and those of recurrent layers.

Between the layers the tokens of all sequences are the rows of one matrix [B*S,H].
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.llm_graph import llm_outputs
from edgellm_ros.builder.lowering.onnxruntime.blocks import OnnxRuntimeBlocks
from edgellm_ros.builder.lowering.options import LLMOptions
from edgellm_ros.builder.lowering.standard.recurrent import recurrent_outputs
from edgellm_ros.builder.model.decoder import Decoder
from edgellm_ros.builder.weights.weights import Weights


def build_onnxruntime_llm(decoder: Decoder, weights: Weights, options: LLMOptions) -> ModelBuilder:
    """Build `llm/model.cuda.onnx`, or with `options.cpu` `llm/model.cpu.onnx`.

    The graph has the inputs and outputs of `build_llm`, except for these.

    - rope_cos, rope_sin [P,R/2] fp32: a table, P at least C, of which each token takes row position_ids [B,S]
      i64; the tokens of a sequence take rows that follow each other
    - kv_length [B] i64 in place of attention_mask and kv_write_index: number of filled cache rows, of which
      the last are those of the new tokens; each token attends up to its own
    - B = 1 if S > 1: several tokens of one sequence, or one token of several. With GroupQueryAttention and
      without a mask, also several tokens of several sequences, if all have kv_length S: nothing is cached
    - embedding [V,H] if the LM head is the embedding table, which the runtime holds on the device; not with
      `options.cpu`

    With `options.head_states` the graph is `llm/verify.cuda.onnx`, whose tokens may be a tree: there is also
    attention_mask, and position_ids may be any. A token attends to no row after its own, whatever the mask
    says. With `options.only_chains` too, the graph is `llm/verify.chain.cuda.onnx`: without a mask it runs
    the faster kernels of the graph without `head_states`. Hybrids verify chains only.
    """
    graph = ModelBuilder(
        "llm",
        weights,
        options.precision,
        options.lora,
        onnxruntime=not options.cpu,
        kv_cache=options.kv_cache,
        flat=options.cpu,
    )
    config, head_states = decoder.config, options.head_states
    hidden, layers = config.hidden_size, config.num_hidden_layers
    tree = head_states is not None and config.recurrent is None and not options.only_chains
    blocks = OnnxRuntimeBlocks(
        graph, decoder, options.capacity, tree=tree, verifies=options.verifies, cpu=options.cpu
    )
    tokens = blocks.step.tokens

    hidden_states: dict[int, ir.Value] = {}
    layer_inputs: list[ir.Value] = []  # and the last layer's output
    x: ir.Value = tokens.flatten(blocks.step.embeds, hidden)
    update: ir.Value | None = None  # what is still to be added to x
    for i, layer in enumerate(decoder.layers):
        with graph.module(f"{decoder.prefix}.layers.{i}", nodes=f"layers.{i}"):
            for residual in layer:
                x, normed = blocks.add_norm(residual.norm, x, update)
                if residual is layer[0]:
                    layer_inputs.append(x)
                update = blocks.block(residual, normed)
            if i + 1 in options.hidden_state_layers and i + 1 < layers:
                x, update = graph.op("Add", x, update), None
                hidden_states[i + 1] = tokens.unflatten(x, hidden)
            if i < len(blocks.deepstack):
                if update is not None:
                    x = graph.op("Add", x, update)
                update = tokens.flatten(blocks.deepstack[i], hidden)
    with graph.module(decoder.prefix, nodes=""):
        x, normed = blocks.add_norm(decoder.last_norm, x, update)
    layer_inputs.append(x)
    hidden_states[layers] = tokens.unflatten(normed, hidden)
    rows = graph.rows(hidden_states[layers], blocks.last_token_ids, hidden)
    llm_outputs(
        graph,
        config,
        capacity=options.capacity,
        head=options.head,
        logits=options.head.logits(graph, rows, share_embedding=not options.cpu),
        presents=blocks.presents,
        hidden_states={i: hidden_states[i] for i in options.hidden_state_layers},
    )
    if config.recurrent is not None:
        recurrent_outputs(graph, config.recurrent, blocks.present_states)
    if head_states is not None:
        head_states.add_output(graph, tokens, layer_inputs, hidden_states[layers])
    return graph
