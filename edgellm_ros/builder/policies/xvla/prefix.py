# SPDX-License-Identifier: Apache-2.0
"""Graph of X-VLA's prefix: what the transformer sees beside the actions.

The first image and the task go through the text encoder, further images do not. A task is filled up with
padding tokens, which are attended to like others, as in the training. Rows of missing images are zeros before
their projection.

Source of the model: LeRobot 0.6.1, modeling_xvla.py (XVLAModel.forward_vlm) and soft_transformer.py;
transformers, modeling_bart.py (BartEncoder).
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.attention import attend_heads
from edgellm_ros.builder.graph.graph import FLOAT, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.xvla.architecture import (
    EMBEDDING,
    ENCODER,
    EPSILON,
    HEAD,
    TextEncoder,
    XVLAArchitecture,
)
from edgellm_ros.builder.policies.xvla.domain import domain_bias, domain_linear, domain_matrix
from edgellm_ros.builder.policies.xvla.rows import join_rows
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

FIRST_POSITION = 2  # of BART: two rows of its positions are never used


# image_embeds --+-- first --+-- encoder -- vlm_proj --+
# token_ids -----|-----------+                         +-- pos_emb -- Concat (soft prompts) -- condition
#                +-- others -- aux_visual_proj --------+
# state -- action_encoder -- state_features
def build_prefix(architecture: XVLAArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `prefix/model.onnx`.

    Inputs:
    - image_embeds [I,H] in the precision's type: the rows of all images that there are
    - token_ids [L] i64: of the task
    - state [1,D] fp32: normalised, filled up with zeros

    Outputs in the precision's type, whose sizes do not depend on I and L:
    - condition [1,R,W]: rows of images, task and soft prompts
    - state_features [1,1,W]: what the state adds to the rows of the actions
    """
    graph = ModelBuilder("prefix", weights, precision)
    hidden, width = architecture.text.hidden_size, architecture.hidden_size
    tokens, horizon = architecture.tower.tokens, architecture.horizon
    images = graph.input(names.IMAGE_EMBEDS, graph.dtype, ["I", hidden])
    token_ids = graph.input(names.TOKEN_IDS, INT64, ["L"])
    state = graph.input(names.STATE, FLOAT, [1, architecture.state_dim])
    with graph.scope("embed"):
        batch = graph.constant([0])
        rows_of_images = graph.op("Unsqueeze", images, batch)
        first = _between(graph, rows_of_images, 0, tokens, axis=1)
        words = graph.op("Unsqueeze", _words(graph, architecture, token_ids), batch)
        x = join_rows(graph, first, words, width=hidden)
    x = _encoder(graph, architecture.text, x, architecture.encoder_rows)
    with graph.module(HEAD, nodes=""):
        rows = [_project(graph, architecture, "vlm_proj", x)]
        if architecture.views > 1:
            end = architecture.views * tokens
            size = graph.constant([1, end - tokens, hidden])
            missing = graph.op("Expand", graph.constant(0, graph.dtype), size)
            filled = join_rows(graph, rows_of_images, missing, width=hidden)
            others = _between(graph, filled, tokens, end, axis=1)
            rows.append(_project(graph, architecture, "aux_visual_proj", others))
        joined = join_rows(graph, *rows, width=width) if len(rows) > 1 else rows[0]
        places = range(horizon, horizon + architecture.prefix_rows)
        x = graph.op("Add", joined, action_positions(graph, architecture, places))
        if architecture.soft_prompts:
            x = join_rows(graph, x, _soft_prompts(graph, architecture), width=width)
        features = _state_features(graph, architecture, state)
    rows_in_all = architecture.prefix_rows + architecture.soft_prompts
    graph.output(x, names.CONDITION, graph.dtype, [1, rows_in_all, width])
    graph.output(features, names.STATE_FEATURES, graph.dtype, [1, 1, width])
    return graph


def action_positions(graph: ModelBuilder, architecture: XVLAArchitecture, places: range) -> ir.Value:
    """Add the learned positions [rows, W] of some rows.

    The actions are the first rows, the prefix follows.
    """
    weights, full = graph.weights, graph.full_name("pos_emb")
    weights.require(full, (1, architecture.positions, architecture.hidden_size))
    shape = len(places), architecture.hidden_size
    return graph.weight(
        f"{full}.{places.start}", shape, lambda: weights.read(full)[0, places.start : places.stop]
    )


def _between(graph: ModelBuilder, x: ir.Value, start: int, end: int, axis: int) -> ir.Value:
    """Add a cut of x along an axis."""
    return graph.op("Slice", x, graph.constant([start]), graph.constant([end]), graph.constant([axis]))


def _words(graph: ModelBuilder, architecture: XVLAArchitecture, token_ids: ir.Value) -> ir.Value:
    """Add the embeddings [max_tokens, H] of a task that is filled up."""
    text, most = architecture.text, architecture.max_tokens
    padding = graph.constant([text.pad_token] * most)
    filled = _between(graph, graph.op("Concat", token_ids, padding, axis=0), 0, most, axis=0)
    table = graph.tensor(EMBEDDING, text.vocab_size, text.hidden_size)
    return graph.op("Gather", table, filled, axis=0)


# x -- embed_positions -- layernorm_embedding -- layers.0 -- ... -- layers.L-1 -->
def _encoder(graph: ModelBuilder, text: TextEncoder, x: ir.Value, rows: int) -> ir.Value:
    """Add BART's encoder over rows [1,rows,H]; all rows see all."""
    hidden, weights = text.hidden_size, graph.weights
    positions = f"{ENCODER}.embed_positions.weight"
    weights.require(positions, (text.positions + FIRST_POSITION, hidden))
    own = graph.weight(
        positions, (rows, hidden), lambda: weights.read(positions)[FIRST_POSITION : FIRST_POSITION + rows]
    )
    x = graph.op("Add", x, own)
    with graph.module(ENCODER, nodes="encoder"):
        x = graph.layer_norm("layernorm_embedding", x, hidden, EPSILON)
        for i in range(text.layers):
            with graph.module(f"layers.{i}"):
                with graph.module("self_attn"):
                    parts = {f"{name}_proj": hidden for name in "qkv"}
                    qkv = graph.linears("qkv_proj", parts, x, hidden, bias=True)
                    update = attend_heads(graph, qkv, text.heads, hidden // text.heads)
                    update = graph.linear("out_proj", update, hidden, hidden, bias=True)
                x = graph.layer_norm("self_attn_layer_norm", graph.op("Add", x, update), hidden, EPSILON)
                raised = graph.op("Gelu", graph.linear("fc1", x, hidden, text.inner_size, bias=True))
                update = graph.linear("fc2", raised, text.inner_size, hidden, bias=True)
                x = graph.layer_norm("final_layer_norm", graph.op("Add", x, update), hidden, EPSILON)
    return x


def _project(graph: ModelBuilder, architecture: XVLAArchitecture, name: str, x: ir.Value) -> ir.Value:
    """Add a projection of rows of the prefix to the transformer, [1,n,H] -> [1,n,W]."""
    sizes = architecture.text.hidden_size, architecture.hidden_size
    if architecture.own_projections:
        return domain_linear(graph, architecture, name, x, sizes)
    return graph.linear(name, x, *sizes, bias=True)


def _soft_prompts(graph: ModelBuilder, architecture: XVLAArchitecture) -> ir.Value:
    """Add the soft prompts [1,n,W] of the domain."""
    weights, full = graph.weights, graph.full_name("soft_prompt_hub.weight")
    count, width = architecture.soft_prompts, architecture.hidden_size
    weights.require(full, (architecture.domains, count * width))
    return graph.weight(
        full, (1, count, width), lambda: weights.read(full)[architecture.domain].reshape(1, count, width)
    )


def _state_features(graph: ModelBuilder, architecture: XVLAArchitecture, state: ir.Value) -> ir.Value:
    """Add the part [1,1,W] of the actions' embedding that depends on the state alone."""
    first, width = architecture.action_dim, architecture.hidden_size
    rows = range(first, first + architecture.state_dim)
    with graph.scope("action_encoder"):
        matrix = domain_matrix(
            graph, architecture, "action_encoder", encoder_sizes(architecture), rows, architecture.grippers
        )
        features = graph.op("MatMul", graph.from_fp32(state), matrix)
        features = graph.op("Add", features, domain_bias(graph, architecture, "action_encoder", width))
        return graph.op("Unsqueeze", features, graph.constant([0]))


def encoder_sizes(architecture: XVLAArchitecture) -> tuple[int, int]:
    """Return inputs and outputs of the actions' embedding: action, state and time."""
    inputs = architecture.action_dim + architecture.state_dim + architecture.time_size
    return inputs, architecture.hidden_size
