# SPDX-License-Identifier: Apache-2.0
"""Graph of InternVL's vision tower (InternViT) and projector: from tiles to embeddings.

The graph encodes the tiles of one image. All tiles have one size, so that the positions are constants.

Source of the model: transformers, modeling_internvl.py, InternVLVisionModel and InternVLMultiModalProjector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.graph import FLOAT
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.multimodal.vision_config import InternVLVisionConfig

HEADS_EPSILON = 1e-6  # of the norms of queries and keys; a constant in the model code
PROJECTOR_EPSILON = 1e-5  # PyTorch's default, which the model code uses


@dataclass(frozen=True)
class VisionArchitecture:
    """Vision tower and projector."""

    config: InternVLVisionConfig  # for the runtime; the graph uses all fields
    prefix: str  # of the tensors before "vision_tower": "model." or ""
    intermediate_size: int
    epsilon: float  # of the tower's norms, but those of queries and keys
    rms_norms: bool  # the norms of a layer are RMSNorms, not LayerNorms
    last_norm: bool  # a LayerNorm follows the last layer
    positions: bool  # learned embeddings of positions
    qkv_bias: bool
    qk_norms: bool  # an RMSNorm over all heads' queries, and one over their keys


# pixel_values -- patch_embeddings --(+)-- layer.0 -- ... -- layer.L-1 -- Slice -- projector -- image_embeds
#                                     |                                  (no class token)
#                           class token and positions
def build_vision(architecture: VisionArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `visual/model.onnx`.

    T tiles of one image, P patches of a tile in the processor's order (merge block by merge block).

    Input: pixel_values [T,P,C*p*p] fp32, normalised.

    Output: image_embeds [R,H] in the precision's type, one row per merge block of m*m patches of each tile:
    R = T*P/m^2. The reference's pixel shuffle puts together the m*m patches of a merge block, row by row,
    which is the order that they have from the beginning.
    """
    graph = ModelBuilder("visual", weights, precision)
    config = architecture.config
    merged = config.patches_per_token * config.hidden_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["T", config.tile_patches, config.patch_dim])
    with graph.module(f"{architecture.prefix}vision_tower", nodes="vision_tower"):
        x = _embeddings(graph, architecture, graph.from_fp32(pixels))
        for i in range(config.depth):
            with graph.module(f"encoder.layer.{i}", nodes=f"layer.{i}"):
                x = _layer(graph, architecture, x)
        if architecture.last_norm:
            x = graph.layer_norm("layernorm", x, config.hidden_size, architecture.epsilon)
        ends = (graph.constant([bound]) for bound in (1, config.tile_patches + 1))
        x = graph.op("Slice", x, *ends, graph.constant([1]))
    with graph.module(f"{architecture.prefix}multi_modal_projector", nodes="projector"):
        x = graph.layer_norm("layer_norm", graph.reshape(x, [-1, merged]), merged, PROJECTOR_EPSILON)
        x = graph.linear("linear_1", x, merged, config.out_hidden_size, bias=True)
        x = graph.op("Gelu", x, approximate="none")
        x = graph.linear("linear_2", x, config.out_hidden_size, config.out_hidden_size, bias=True)
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", config.out_hidden_size])
    return graph


# x [T,P,C*p*p] -- projection -- Pad [T,1+P,hidden] --(+)-->
#                                                      |
#             [class token + position 0; bias + positions 1..P]
def _embeddings(graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value) -> ir.Value:
    """Add the patch convolution, the class token and positions: [T,P,C*p*p] -> [T,1+P,hidden]."""
    config = architecture.config
    hidden, rows = config.hidden_size, config.tile_patches + 1
    with graph.module("embeddings"):
        stored = {
            "cls_token": (1, 1, hidden),
            "patch_embeddings.projection.bias": (hidden,),
            **({"position_embeddings": (1, rows, hidden)} if architecture.positions else {}),
        }
        full = {name: graph.full_name(name) for name in stored}
        for name, shape in stored.items():
            graph.weights.require(full[name], shape)

        def read() -> np.ndarray:
            tensors = {
                name: graph.weights.read(full[name]).astype(np.float32).reshape(-1, hidden) for name in stored
            }
            added = np.concatenate(
                [
                    tensors["cls_token"],
                    tensors["patch_embeddings.projection.bias"].repeat(config.tile_patches, axis=0),
                ]
            )
            if architecture.positions:
                added[0] += tensors["position_embeddings"][0]
                added[1:] += tensors["position_embeddings"][1:][merge_order(config)]
            return added

        with graph.module("patch_embeddings"):
            x = graph.linear("projection", x, config.patch_dim, hidden)
        x = graph.op("Pad", x, graph.constant([0, 1, 0, 0, 0, 0]))
        return graph.op("Add", x, graph.weight(graph.full_name("added"), (rows, hidden), read))


def merge_order(config: InternVLVisionConfig) -> np.ndarray:
    """List the patches of a tile, counted row by row, merge block by merge block: [P]."""
    merge = config.spatial_merge_size
    side = config.tile_size // config.patch_size
    patches = np.arange(side**2).reshape(side // merge, merge, side // merge, merge)
    return patches.transpose(0, 2, 1, 3).reshape(-1)


# x --+-- layernorm_before -- attention -- lambda_1 --(+)--+-- layernorm_after -- mlp -- lambda_2 --(+)-->
#     +------------------------------------------------+   +-----------------------------------------+
def _layer(graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value) -> ir.Value:
    """Add a transformer layer, x [T,1+P,hidden] -> [T,1+P,hidden]."""
    hidden, inner = architecture.config.hidden_size, architecture.intermediate_size
    norm = graph.rms_norm if architecture.rms_norms else graph.layer_norm
    attended = _attention(graph, architecture, norm("layernorm_before", x, hidden, architecture.epsilon))
    x = graph.op("Add", x, graph.op("Mul", attended, graph.tensor("lambda_1", hidden)))
    normed = norm("layernorm_after", x, hidden, architecture.epsilon)
    with graph.module("mlp"):
        raised = graph.linear("fc1", normed, hidden, inner, bias=True)
        raised = graph.op("Gelu", raised, approximate="none")
        lowered = graph.linear("fc2", raised, inner, hidden, bias=True)
    return graph.op("Add", x, graph.op("Mul", lowered, graph.tensor("lambda_2", hidden)))


# (q_norm and k_norm: only with qk_norms)
#
# x -- qkv_proj --+-- q -- q_norm --+
#                 +-- k -- k_norm --+-- Attention -- projection_layer -->
#                 +-- v ------------+
def _attention(graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value) -> ir.Value:
    """Add attention among the patches of a tile, x [T,1+P,hidden] -> [T,1+P,hidden]."""
    config = architecture.config
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    with graph.module("attention"):
        widths = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        q, k, v = graph.linears("qkv_proj", widths, x, hidden, architecture.qkv_bias)
        if architecture.qk_norms:
            q = graph.rms_norm("q_norm", q, hidden, HEADS_EPSILON)
            k = graph.rms_norm("k_norm", k, hidden, HEADS_EPSILON)
        q, k, v = (
            graph.transpose(graph.reshape(rows, [0, 0, heads, head_dim]), 0, 2, 1, 3) for rows in (q, k, v)
        )
        attended = graph.op("Attention", q, k, v, scale=head_dim**-0.5)
        attended = graph.reshape(graph.transpose(attended, 0, 2, 1, 3), [0, 0, hidden])
        return graph.linear("projection_layer", attended, hidden, hidden, bias=True)
