# SPDX-License-Identifier: Apache-2.0
"""Graph of the vision tower of Qwen3-VL, Qwen3-Omni and Qwen3.5.

The graph computes embeddings from patches. One run encodes one image, or one group of video frames, as
patches attend to their own group only. Everything that depends only on the image's size (rotary angles,
resampling of the learned position grid) is an input, so that one graph serves all sizes.

Sources of the models: transformers, modeling_qwen3_vl.py, Qwen3VLVisionModel; modeling_qwen3_omni_moe.py,
Qwen3OmniMoeVisionEncoder; modeling_qwen3_5.py, Qwen3_5VisionModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig, QwenVisionTower

EPSILON = 1e-6  # of every LayerNorm; a constant in the model code
QKV = ("qkv",)  # the layer that makes queries, keys and values


@dataclass(frozen=True)
class MergerNames:
    """Names of the modules that merge patches, which differ between the models."""

    deepstack: str | None  # the list of the inner blocks' mergers; None = the model has none
    norm: str
    first: str
    second: str


@dataclass(frozen=True)
class VisionArchitecture:
    """Vision tower."""

    config: Qwen3VisionConfig  # for the runtime; the graph uses all fields
    prefix: str  # of the tower's tensors, such as "model.visual"
    names: MergerNames
    intermediate_size: int


# pixel_values -- patch_embed --(+)-- blocks.0 -- blocks.1 --+-- blocks.2 -- ... -- merger -- image_embeds
#                                |                           |
#                            pos_embed                 merger_list.0 -- deepstack_embeds_0
def build_vision(architecture: VisionArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `visual/model.onnx`.

    P patches of one image, in the processor's order (merge block by merge block).

    Inputs:
    - pixel_values [P,C*T*p*p] fp32, normalised: T frames of each patch, 1 for a tower that takes no videos
    - rope_cos, rope_sin [P,D/2] fp32: half of the angles from a patch's row, half from its column
    - pos_embed_index [4,P] i64, pos_embed_weight [4,P] fp32: the four points of the learned position grid
      around a patch and their bilinear weights

    Outputs: image_embeds [R,H] and deepstack_embeds_i [R,H] in the precision's type, one row per merge block
    of m*m patches: R = P/m^2.
    """
    graph = ModelBuilder("visual", weights, precision)
    config = architecture.config
    hidden, merged = config.hidden_size, config.patches_per_token * config.hidden_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["P", config.patch_dim])
    angles = [
        graph.input(name, FLOAT, ["P", config.head_dim // 2]) for name in (names.ROPE_COS, names.ROPE_SIN)
    ]
    index = graph.input(names.POS_EMBED_INDEX, INT64, [4, "P"])
    share = graph.input(names.POS_EMBED_WEIGHT, FLOAT, [4, "P"])

    deepstack = []
    with graph.module(architecture.prefix, nodes=""):
        with graph.module("patch_embed"):
            x = patch_embed(graph, config, graph.from_fp32(pixels), bias=True)
        with graph.module("pos_embed"):
            table = graph.tensor("weight", config.num_position_embeddings, hidden)
            share = graph.op("Unsqueeze", graph.from_fp32(share), graph.constant([-1]))
            corners = graph.op("Mul", graph.op("Gather", table, index, axis=0), share)
            x = graph.op("Add", x, graph.op("ReduceSum", corners, graph.constant([0]), keepdims=0))
        with graph.scope("rope"):
            cos, sin = (graph.op("Unsqueeze", graph.from_fp32(rows), graph.constant([0])) for rows in angles)
        for i in range(config.depth):
            with graph.module(f"blocks.{i}"):
                x = _block(graph, architecture, x, cos, sin)
            if i in config.deepstack_visual_indexes:
                level = config.deepstack_visual_indexes.index(i)
                with graph.module(f"{architecture.names.deepstack}.{level}"):
                    rows = graph.reshape(x, [-1, merged])
                    rows = graph.layer_norm(architecture.names.norm, rows, merged, EPSILON)
                    deepstack.append(_merger_mlp(graph, architecture, rows))
        with graph.module("merger"):
            rows = graph.layer_norm(architecture.names.norm, x, hidden, EPSILON)
            rows = graph.reshape(rows, [-1, merged])
            embeds = _merger_mlp(graph, architecture, rows)
    graph.output(embeds, names.IMAGE_EMBEDS, graph.dtype, ["R", config.out_hidden_size])
    for i, value in enumerate(deepstack):
        graph.output(value, names.deepstack_embeds(i), graph.dtype, ["R", config.out_hidden_size])
    return graph


def patch_embed(graph: ModelBuilder, config: QwenVisionTower, x: ir.Value, bias: bool) -> ir.Value:
    """Add the patch convolution, x [P,C*T*p*p] -> [P,hidden].

    The checkpoint has weights for the frames of a video. A still image repeats one frame, so for a tower that
    takes images only, x has one frame and the weights are summed over the frames: a fraction of the products,
    equal up to rounding.
    """
    hidden, patch = config.hidden_size, config.patch_size
    with graph.module("proj"):
        stored = graph.full_name("weight")
        graph.weights.require(stored, (hidden, config.in_channels, config.temporal_patch_size, patch, patch))

        def read() -> np.ndarray:
            weight = graph.weights.read(stored).astype(np.float32)
            if config.video is None:
                weight = weight.sum(axis=2)
            return weight.reshape(hidden, config.patch_dim).T

        x = graph.op("MatMul", x, graph.weight(stored, (config.patch_dim, hidden), read))
        return graph.op("Add", x, graph.tensor("bias", hidden)) if bias else x


# x --+-- norm1 -- attn --(+)--+-- norm2 -- linear_fc1 -- Gelu -- linear_fc2 --(+)-->
#     +--------------------+   +------------------------------------------------+
def _block(
    graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value, cos: ir.Value, sin: ir.Value
) -> ir.Value:
    """Add a transformer block, x [P,hidden] -> [P,hidden]."""
    hidden, inner = architecture.config.hidden_size, architecture.intermediate_size
    normed = graph.layer_norm("norm1", x, hidden, EPSILON)
    x = graph.op("Add", x, attention(graph, architecture.config, normed, cos, sin))
    normed = graph.layer_norm("norm2", x, hidden, EPSILON)
    with graph.module("mlp"):
        raised = graph.linear("linear_fc1", normed, hidden, inner, bias=True)
        raised = graph.op("Gelu", raised, approximate="tanh")
        return graph.op("Add", x, graph.linear("linear_fc2", raised, inner, hidden, bias=True))


# x -- qkv -- [3,heads,P,D] -- Split --+-- RotaryEmbedding -- Reshape [1,heads*m*m,P/(m*m),D] --+
#                                      +-- RotaryEmbedding ------------------------------------+
#                                      +--------------------------------------------------- Attention
#                                                                                              |
#              <-- proj -- Reshape [P,hidden] -- Transpose [1,P,heads,D] -- Reshape [1,heads,P,D]
def attention(
    graph: ModelBuilder,
    config: QwenVisionTower,
    x: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    layers: Sequence[str] = QKV,
) -> ir.Value:
    """Add attention of every patch to every patch, x [P,hidden] -> [P,hidden].

    layers: names of the layers that together make queries, keys and values; they are one product.
    The queries of a head are split into several heads with one key head: the same bits, but more parts to
    spread over threads. ONNX Runtime 1.31 gave all of 3 heads to one of 2 threads (3.8 ms per image of 280
    patches, 2.1 ms with the split).
    """
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    parts = config.patches_per_token  # P is a multiple of it
    with graph.module("attn"):
        qkv = queries_keys_values(graph, config, x, layers)
        qkv = graph.transpose(graph.reshape(qkv, [0, 3, heads, head_dim]), (1, 2, 0, 3))
        q, k, v = graph.split(qkv, [1, 1, 1], axis=0)
        q, k = graph.op("RotaryEmbedding", q, cos, sin), graph.op("RotaryEmbedding", k, cos, sin)
        q = graph.reshape(q, [0, heads * parts, -1, head_dim])
        attended = graph.op("Attention", q, k, v, scale=head_dim**-0.5)
        attended = graph.reshape(attended, [0, heads, -1, head_dim])
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [-1, hidden])
        return graph.linear("proj", attended, hidden, hidden, bias=True)


def queries_keys_values(
    graph: ModelBuilder, config: QwenVisionTower, x: ir.Value, layers: Sequence[str]
) -> ir.Value:
    """Add the layers before attention as one product, x [P,hidden] -> [P,3*hidden]."""
    hidden = config.hidden_size
    parts = dict.fromkeys(layers, 3 * hidden // len(layers))
    return graph.joined_linears("qkv", parts, x, hidden, bias=True)


def _merger_mlp(graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value) -> ir.Value:
    """Merge the patches of a merge block into one embedding: first -- Gelu -- second."""
    config, modules = architecture.config, architecture.names
    merged = config.patches_per_token * config.hidden_size
    raised = graph.op("Gelu", graph.linear(modules.first, x, merged, merged, bias=True), approximate="none")
    return graph.linear(modules.second, raised, merged, config.out_hidden_size, bias=True)
