# SPDX-License-Identifier: Apache-2.0
"""Graph of GR00T's prefix: the context of the DiT, and the row of the state.

The layers of the DiT that attend to the context attend to the rows of images or to those of text. So the
graph has them apart, and computes their keys and values, which do not depend on the actions.

Sources of the models: LeRobot 0.6.1, policies/groot/groot_n1_7.py (Qwen3Backbone, GR00TN17ActionHead); NVIDIA
Isaac-GR00T, branch n1.6-release, gr00t/model/modules/eagle_backbone.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, INT64, Dim
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.lowering.feed_forward import feed_forward as decoder_feed_forward
from edgellm_ros.builder.lowering.norms import rms_norm
from edgellm_ros.builder.lowering.standard.attention import plain_attention
from edgellm_ros.builder.lowering.standard.recurrent import lower_triangle
from edgellm_ros.builder.model.decoder import Attention, Decoder, SwiGLU
from edgellm_ros.builder.policies.groot.architecture import HEAD, GrootArchitecture
from edgellm_ros.builder.policies.groot.layers import (
    EPSILON,
    embodiment_mlp,
    feed_forward,
    self_attention,
    split_heads,
)
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names


# image_embeds ---------+
# token_ids -- Gather --+-- order -- layers.0 -- ... -- layers.L-1 -- places -- vlln -- vl_self_attention
# deepstack_embeds_i ----------------------+          (-- norm)                            |
#                                                          to_k, to_v: context_key_i, context_value_i
# state -- state_encoder -- state_features
def build_prefix(architecture: GrootArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `prefix/model.onnx`.

    Of the S = I + L rows, I are of images and L of tokens.

    Inputs:
    - image_embeds [I,H], and deepstack_embeds_i [I,H] of a tower that has them, in the precision's type: the
      rows of all images
    - token_ids [L] i64: of the text, without the placeholders of images
    - row_order [S] i64: of each row of the prompt, its place among the rows of images and then tokens
    - row_places [S] i64: of each of these, its row in the prompt
    - rope_cos, rope_sin [1,S,D/2] fp32: by row of the prompt
    - state [1,D] fp32: normalised, filled up with zeros

    Outputs in the precision's type:
    - state_features [1,1,W]: the row before the actions
    - for each layer i of the DiT that attends to the context: context_key_i, context_value_i [1,heads,R,D],
      R = I rows of images or L rows of text
    """
    graph = ModelBuilder("prefix", weights, precision)
    decoder = architecture.backbone.decoder
    hidden = decoder.config.hidden_size
    images = graph.input(names.IMAGE_EMBEDS, graph.dtype, ["I", hidden])
    levels = range(decoder.config.num_deepstack_features)
    deepstack = [graph.input(names.deepstack_embeds(i), graph.dtype, ["I", hidden]) for i in levels]
    tokens = graph.input(names.TOKEN_IDS, INT64, ["L"])
    order, places = (graph.input(name, INT64, ["S"]) for name in (names.ROW_ORDER, names.ROW_PLACES))
    pairs = decoder.config.rope.rotary_dim // 2
    angles = [graph.input(name, FLOAT, [1, "S", pairs]) for name in (names.ROPE_COS, names.ROPE_SIN)]
    with graph.scope("rope"):
        rope = [graph.from_fp32(each) for each in angles]
    with graph.scope("embed"):
        vocab = decoder.config.vocab_size
        with graph.module(decoder.prefix, nodes=""), graph.module(decoder.table):
            words = graph.op("Gather", graph.tensor("weight", vocab, hidden), tokens, axis=0)
        x = _in_order(graph, images, words, order)
        added = []
        if deepstack:
            nothing = graph.op("Mul", words, graph.constant(0, graph.dtype))
            added = [_in_order(graph, each, nothing, order) for each in deepstack]
    x = _decoder(graph, decoder, x, added, rope)
    if architecture.backbone.norm:
        with graph.module(decoder.prefix, nodes=""):
            x = rms_norm(graph, decoder.norm, decoder.last_norm, x, hidden)
    with graph.scope("rows"):
        x = graph.op("Gather", x, places, axis=1)
    x = _vision_language_layers(graph, architecture, x)
    _outputs(graph, architecture, x, images)
    state = graph.input(names.STATE, FLOAT, [1, architecture.state_dim])
    width = architecture.dit.width
    with graph.module(HEAD, nodes=""):
        row = graph.op("Unsqueeze", graph.from_fp32(state), graph.constant([0]))
        sizes = architecture.state_dim, architecture.inner_size, width
        row = embodiment_mlp(graph, architecture, "state_encoder", row, sizes)
    graph.output(row, names.STATE_FEATURES, graph.dtype, [1, 1, width])
    return graph


def _in_order(graph: ModelBuilder, images: ir.Value, words: ir.Value, order: ir.Value) -> ir.Value:
    """Put rows of images [I,H] and tokens [L,H] into the order of the prompt [1,S,H]."""
    rows = graph.op("Gather", graph.op("Concat", images, words, axis=0), order, axis=0)
    return graph.op("Unsqueeze", rows, graph.constant([0]))


def _decoder(
    graph: ModelBuilder,
    decoder: Decoder,
    x: ir.Value,
    deepstack: Sequence[ir.Value],
    rope: Sequence[ir.Value],
) -> ir.Value:
    """Add the layers of the language model [1,S,H], without the norm after them."""
    hidden, tokens = decoder.config.hidden_size, TokenLayout(graph, None)
    with graph.scope("mask"):
        triangle = lower_triangle(graph, graph.op("Shape", x, start=1, end=2))
        mask = graph.op("Unsqueeze", triangle, graph.constant([0, 1]))
    for i, layer in enumerate(decoder.layers):
        with graph.module(f"{decoder.prefix}.layers.{i}", nodes=f"layers.{i}"):
            for residual in layer:
                normed = rms_norm(graph, decoder.norm, residual.norm, x, hidden)
                if isinstance(residual.block, Attention):
                    module, block = residual.module, residual.block
                    update = plain_attention(
                        graph, decoder, module, block, tokens=tokens, rope=rope, mask=mask, x=normed
                    )
                else:
                    assert isinstance(residual.block, SwiGLU)
                    update = decoder_feed_forward(graph, residual.module, residual.block, normed, hidden)
                x = graph.op("Add", x, update)
        if i < len(deepstack):
            x = graph.op("Add", x, deepstack[i])
    return x


def _vision_language_layers(graph: ModelBuilder, architecture: GrootArchitecture, x: ir.Value) -> ir.Value:
    """Add the LayerNorm and the layers of self-attention over all rows [1,S,H]."""
    hidden = architecture.backbone.decoder.config.hidden_size
    with graph.module(HEAD, nodes=""):
        if architecture.vlln:
            x = graph.layer_norm("vlln", x, hidden, EPSILON)
        for i in range(architecture.vl.layers):
            with graph.module(f"vl_self_attention.transformer_blocks.{i}"):
                normed = graph.layer_norm("norm1", x, hidden, EPSILON)
                x = graph.op("Add", x, self_attention(graph, normed, architecture.vl))
                normed = graph.layer_norm("norm3", x, hidden, EPSILON)
                x = graph.op("Add", x, feed_forward(graph, normed, hidden))
    return x


def _outputs(graph: ModelBuilder, architecture: GrootArchitecture, x: ir.Value, images: ir.Value) -> None:
    """Add keys and values of rows [1,S,H], those of images first."""
    sizes, hidden = architecture.dit, architecture.backbone.decoder.config.hidden_size
    with graph.scope("rows"):
        count = graph.op("Shape", images, start=0, end=1)
        start, end, axis = graph.constant([0]), graph.constant([2**31 - 1]), graph.constant([1])
        rows = {
            "I": graph.op("Slice", x, start, count, axis),
            "L": graph.op("Slice", x, count, end, axis),
        }
    for i in architecture.context_layers:
        kind = "L" if architecture.attends_to_text(i) else "I"
        shape: list[Dim] = [1, sizes.heads, kind, sizes.head_dim]
        module = f"{HEAD}.model.transformer_blocks.{i}.attn1"
        with graph.module(module, nodes=f"context.{i}"):
            parts = {"to_k": sizes.width, "to_v": sizes.width}
            keys, values = (
                split_heads(graph, part, sizes)
                for part in graph.linears("to_kv", parts, rows[kind], hidden, bias=True)
            )
        graph.output(keys, names.context_key(i), graph.dtype, shape)
        graph.output(values, names.context_value(i), graph.dtype, shape)
