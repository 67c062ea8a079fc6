# SPDX-License-Identifier: Apache-2.0
"""Graph of InternVL's vision tower and projector: tiles to embeddings.

The tower is InternViT. The graph encodes the tiles of one image. All tiles have one size, so that the
positions are constants.

Source of the model: transformers, modeling_internvl.py, InternVLVisionModel and InternVLMultiModalProjector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.attention import attend_heads
from edgellm_ros.builder.graph.graph import FLOAT, ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.residual import NormSizes, Product, add_norm
from edgellm_ros.builder.weights.weights import Weights
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
def build_vision(
    architecture: VisionArchitecture, weights: Weights, precision: str, cuda: bool = False
) -> ModelBuilder:
    """Build `visual/model.onnx`, or with `cuda` `visual/model.cuda.onnx`.

    T tiles of one image, P patches of a tile in the processor's order (merge block by merge block).

    Input: pixel_values [T,P,C*p*p] fp32, normalised.

    Output: image_embeds [R,H] in the precision's type, one row per merge block of m*m patches of each tile:
    R = T*P/m^2. The reference's pixel shuffle puts together the m*m patches of a merge block, row by row,
    which is the order that they have from the beginning.

    The graph for CUDA has ONNX Runtime's own operators: attention without transposed copies, and biases,
    residual and norm in one kernel.
    """
    graph = ModelBuilder("visual", weights, precision)
    config, hidden = architecture.config, architecture.config.hidden_size
    merged = config.patches_per_token * hidden
    attend = _attention_cuda if cuda else _attention
    sizes = NormSizes(hidden, architecture.epsilon, architecture.rms_norms)
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["T", config.tile_patches, config.patch_dim])
    with graph.module(f"{architecture.prefix}vision_tower", nodes="vision_tower"):
        x = _embeddings(graph, architecture, pixels)
        normed = sizes.norm(graph, "encoder.layer.0.layernorm_before", x)
        for i in range(config.depth):
            with graph.module(f"encoder.layer.{i}", nodes=f"layer.{i}"):
                with graph.module("attention"):
                    attended = attend(graph, architecture, normed)
                update = _scaled_linear(graph, "attention.projection_layer", "lambda_1", attended, hidden)
                x, normed = add_norm(graph, sizes, "layernorm_after", x, update, cuda=cuda)
                raised = graph.linear("mlp.fc1", normed, hidden, architecture.intermediate_size, bias=True)
                raised = graph.op("Gelu", raised, approximate="none")
                update = _scaled_linear(graph, "mlp.fc2", "lambda_2", raised, hidden)
            if i + 1 < config.depth:
                following = f"encoder.layer.{i + 1}.layernorm_before"
                x, normed = add_norm(graph, sizes, following, x, update, cuda=cuda)
        x = graph.op("Add", x, update.with_bias(graph))
        if architecture.last_norm:
            x = graph.layer_norm("layernorm", x, hidden, architecture.epsilon)
        ends = (graph.constant([bound]) for bound in (1, config.tile_patches + 1))
        x = graph.op("Slice", x, *ends, graph.constant([1]))
    with graph.module(f"{architecture.prefix}multi_modal_projector", nodes="projector"):
        x = graph.layer_norm("layer_norm", graph.reshape(x, [-1, merged]), merged, PROJECTOR_EPSILON)
        x = graph.linear("linear_1", x, merged, config.out_hidden_size, bias=True)
        x = graph.op("Gelu", x, approximate="none")
        x = graph.linear("linear_2", x, config.out_hidden_size, config.out_hidden_size, bias=True)
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", config.out_hidden_size])
    return graph


# pixels [T,P,C*p*p] -- Pad [T,1+P,C*p*p] -- projection --(+)-->
#                                                          |
#                 [class token + position 0; bias + positions 1..P]
def _embeddings(graph: ModelBuilder, architecture: VisionArchitecture, pixels: ir.Value) -> ir.Value:
    """Add the patch convolution, the class token and positions.

    [T,P,C*p*p] fp32 -> [T,1+P,hidden].
    """
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
            # the class token is a patch of zeros; ONNX Runtime's CUDA provider has no Pad in bf16
            x = graph.op("Pad", pixels, graph.constant([0, 1, 0, 0, 0, 0]))
            x = graph.linear("projection", graph.from_fp32(x), config.patch_dim, hidden)
        return graph.op("Add", x, graph.weight(graph.full_name("added"), (rows, hidden), read))


def merge_order(config: InternVLVisionConfig) -> np.ndarray:
    """List the patches of a tile, counted row by row, merge block by merge block: [P]."""
    merge = config.spatial_merge_size
    side = config.tile_size // config.patch_size
    patches = np.arange(side**2).reshape(side // merge, merge, side // merge, merge)
    return patches.transpose(0, 2, 1, 3).reshape(-1)


def _scaled_linear(graph: ModelBuilder, name: str, scale: str, x: ir.Value, fan_out: int) -> Product:
    """Add a linear layer with the layer scale `scale` in its weights.

    The scale multiplies the outputs; the weights contain the factor.
    """
    weight, bias, factor = (graph.full_name(each) for each in (f"{name}.weight", f"{name}.bias", scale))
    fan_in = graph.weights.shape(weight)[-1]
    for full, shape in ((weight, (fan_out, fan_in)), (bias, (fan_out,)), (factor, (fan_out,))):
        graph.weights.require(full, shape)

    def read(full: str) -> np.ndarray:
        return graph.weights.read(full).astype(np.float32)

    with graph.scope(name):
        matrix = graph.weight(weight, (fan_in, fan_out), lambda: (read(weight) * read(factor)[:, None]).T)
        return Product(
            graph.op("MatMul", x, matrix),
            graph.weight(bias, (fan_out,), lambda: read(bias) * read(factor)),
        )


# (q_norm and k_norm: only with qk_norms)
#
# x --+-- q_proj -- q_norm --+
#     +-- k_proj -- k_norm --+-- Attention -->
#     +-- v_proj ------------+
def _attention(graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value) -> ir.Value:
    """Add attention among a tile's patches, without its last projection.

    [T,1+P,hidden] -> the same.
    """
    config = architecture.config
    return attend_heads(graph, _projections(graph, architecture, x), config.num_heads, config.head_dim)


def _attention_cuda(graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value) -> ir.Value:
    """Add `_attention` with an operator that takes rows as the projections write them."""
    q, k, v = _projections(graph, architecture, x)
    config = architecture.config
    (attended,) = graph.ops(
        "MultiHeadAttention", q, k, v,
        outputs=1, domain=ORT_DOMAIN, num_heads=config.num_heads, scale=config.head_dim**-0.5,
    )  # fmt: skip
    return attended


def _projections(graph: ModelBuilder, architecture: VisionArchitecture, x: ir.Value) -> Sequence[ir.Value]:
    """Add queries, keys and values [T,1+P,hidden].

    One product, whose weights the fused kernels take too.
    """
    hidden = architecture.config.hidden_size
    parts = {f"{name}_proj": hidden for name in ("q", "k", "v")}
    q, k, v = graph.linears("qkv", parts, x, hidden, architecture.qkv_bias)
    if architecture.qk_norms:
        q = graph.rms_norm("q_norm", q, hidden, HEADS_EPSILON)
        k = graph.rms_norm("k_norm", k, hidden, HEADS_EPSILON)
    return q, k, v
