# SPDX-License-Identifier: Apache-2.0
"""Graph of Qwen2.5-VL's vision tower: from patches to embeddings.

The graph encodes one image. The reference reorders patches window by window, runs each window alone and puts
the rows back in order; here patches keep their order, and a mask separates the windows.

Source of the model: transformers, modeling_qwen2_5_vl.py, Qwen2_5_VisionTransformerPretrainedModel.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.families.qwen3_vl.vision import attention, patch_embed
from edgellm_ros.builder.graph import BOOL, FLOAT
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.multimodal.vision_config import Qwen2_5VisionConfig

EPSILON = 1e-6  # of every RMSNorm; a constant in the model code


@dataclass(frozen=True)
class VisionArchitecture:
    """Vision tower."""

    config: Qwen2_5VisionConfig  # for the runtime; the graph uses all fields
    prefix: str  # of the tower's tensors: "model.visual" or "visual"
    intermediate_size: int


# pixel_values -- patch_embed -- blocks.0 -- blocks.1 -- ... -- merger -- image_embeds
def build_vision(architecture: VisionArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `visual/model.onnx`.

    P patches of one image, in the processor's order (merge block by merge block).

    Inputs:
    - pixel_values [P,C*p*p] fp32, normalised: one frame of each patch
    - rope_cos, rope_sin [P,D/2] fp32: half of the angles from a patch's row, half from its column
    - attention_mask [1,1,P,P] bool: true inside a window; only if a block has windows

    Output: image_embeds [R,H] in the precision's type, one row per merge block of m*m patches: R = P/m^2.
    """
    graph = ModelBuilder("visual", weights, precision)
    config = architecture.config
    hidden, merged = config.hidden_size, config.patches_per_token * config.hidden_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["P", config.patch_dim])
    angles = [
        graph.input(name, FLOAT, ["P", config.head_dim // 2]) for name in (names.ROPE_COS, names.ROPE_SIN)
    ]
    windows = graph.input(names.ATTENTION_MASK, BOOL, [1, 1, "P", "P"]) if config.has_windows else None
    with graph.module(architecture.prefix, nodes=""):
        with graph.module("patch_embed"):
            x = patch_embed(graph, config, graph.from_fp32(pixels), bias=False)
        with graph.scope("rope"):
            cos, sin = (graph.op("Unsqueeze", graph.from_fp32(rows), graph.constant([0])) for rows in angles)
        for i in range(config.depth):
            mask = None if i in config.full_attention_blocks else windows
            with graph.module(f"blocks.{i}"):
                x = _block(graph, architecture, x, cos, sin, mask)
        with graph.module("merger"):
            x = graph.reshape(graph.rms_norm("ln_q", x, hidden, EPSILON), [-1, merged])
            x = graph.op("Gelu", graph.linear("mlp.0", x, merged, merged, bias=True), approximate="none")
            x = graph.linear("mlp.2", x, merged, config.out_hidden_size, bias=True)
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", config.out_hidden_size])
    return graph


# x --+-- norm1 -- attn --(+)--+-- norm2 -- mlp --(+)-->
#     +--------------------+   +-------------------+
def _block(
    graph: ModelBuilder,
    architecture: VisionArchitecture,
    x: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    mask: ir.Value | None,
) -> ir.Value:
    """Add a transformer block, x [P,hidden] -> [P,hidden]."""
    config = architecture.config
    normed = graph.rms_norm("norm1", x, config.hidden_size, EPSILON)
    x = graph.op("Add", x, attention(graph, config, normed, cos, sin, mask))
    normed = graph.rms_norm("norm2", x, config.hidden_size, EPSILON)
    inner = architecture.intermediate_size
    return graph.op("Add", x, graph.swiglu("mlp", normed, config.hidden_size, inner, bias=True))
