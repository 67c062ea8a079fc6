# SPDX-License-Identifier: Apache-2.0
"""Graph of the vision tower of Qwen2.5-VL and Qwen2.5-Omni.

The graph makes embeddings of patches. It encodes one image, or one group of video frames. In a block with
windows, queries, keys and values are gathered window by window, and a batch of windows attends; everything
else computes patches in the processor's order. The reference puts patches in the windows' order once, and
embeddings back at the end.

Source of the model: transformers, modeling_qwen2_5_vl.py, Qwen2_5_VisionTransformerPretrainedModel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from edgellm_ros.builder.families.qwen3_vl.vision import QKV, attention, patch_embed, queries_keys_values
from edgellm_ros.builder.graph.graph import BOOL, FLOAT, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.multimodal.vision_config import Qwen2_5VisionConfig

EPSILON = 1e-6  # of every RMSNorm; a constant in the model code


@dataclass(frozen=True)
class VisionArchitecture:
    """Vision tower."""

    config: Qwen2_5VisionConfig  # for the runtime; the graph uses all fields
    prefix: str  # of the tower's tensors: "model.visual" or "visual"
    intermediate_size: int
    qkv: tuple[str, ...] = QKV  # names of the layers that make queries, keys and values


# pixel_values -- patch_embed -- blocks.0 -- blocks.1 -- ... -- merger -- image_embeds
def build_vision(architecture: VisionArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `visual/model.onnx`.

    P patches of one image, in the processor's order (merge block by merge block).

    Inputs:
    - pixel_values [P,C*T*p*p] fp32, normalised: T frames of each patch, 1 for a tower that takes no videos
    - rope_cos, rope_sin [P,D/2] fp32: half of the angles from a patch's row, half from its column
    - window_index [W,L] i64, window_mask [W,1,L,L] bool, patch_index [P] i64: which patches the W windows
      have, where a window has fewer than L, and where each patch is; only if a block has windows

    Output: image_embeds [R,H] in the precision's type, one row per merge block of m*m patches: R = P/m^2.
    """
    graph = ModelBuilder("visual", weights, precision)
    config = architecture.config
    hidden, merged = config.hidden_size, config.patches_per_token * config.hidden_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["P", config.patch_dim])
    angles = [
        graph.input(name, FLOAT, ["P", config.head_dim // 2]) for name in (names.ROPE_COS, names.ROPE_SIN)
    ]
    with graph.module(architecture.prefix, nodes=""):
        with graph.module("patch_embed"):
            x = patch_embed(graph, config, graph.from_fp32(pixels), bias=False)
        with graph.scope("rope"):
            rows = [graph.from_fp32(each) for each in angles]
            cos, sin = (graph.op("Unsqueeze", each, graph.constant([0])) for each in rows)
        attend = partial(attention, graph, config, cos=cos, sin=sin, layers=architecture.qkv)
        attend_windows = attend
        if config.has_windows:
            attend_windows = partial(_window_attention, graph, architecture, _windows(graph, config, rows))
        for i in range(config.depth):
            with graph.module(f"blocks.{i}"):
                full = i in config.full_attention_blocks
                x = _block(graph, architecture, x, attend if full else attend_windows)
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
    attend: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """Add a transformer block, x [P,hidden] -> [P,hidden].

    `attend` adds its attention.
    """
    config = architecture.config
    x = graph.op("Add", x, attend(graph.rms_norm("norm1", x, config.hidden_size, EPSILON)))
    normed = graph.rms_norm("norm2", x, config.hidden_size, EPSILON)
    inner = architecture.intermediate_size
    return graph.op("Add", x, graph.swiglu("mlp", normed, config.hidden_size, inner, bias=True))


@dataclass(frozen=True)
class _Windows:
    """Values that all blocks with windows share."""

    index: ir.Value
    mask: ir.Value
    patch_index: ir.Value
    cos: ir.Value  # of the windows' patches
    sin: ir.Value


def _windows(graph: ModelBuilder, config: Qwen2_5VisionConfig, angles: Sequence[ir.Value]) -> _Windows:
    """Add the inputs of windows; angles: cos and sin [P,D/2] of all patches."""
    size = config.window_patches
    index = graph.input(names.WINDOW_INDEX, INT64, ["W", size])
    mask = graph.input(names.WINDOW_MASK, BOOL, ["W", 1, size, size])
    patch_index = graph.input(names.PATCH_INDEX, INT64, ["P"])
    with graph.scope("windows"):
        cos, sin = (graph.op("Gather", rows, index, axis=0) for rows in angles)
    return _Windows(index, mask, patch_index, cos, sin)


# x -- qkv -- Gather [W,L,3*hidden] -- [W,3*heads,L,D] -- Split --+-- RotaryEmbedding --+
#                                                                 +-- RotaryEmbedding --+
#                                                                 +------------------ Attention (mask)
#                                                                                       |
#              <-- proj -- Gather [P,hidden] -- Reshape [W*L,hidden] -- Transpose [W,L,heads,D]
def _window_attention(
    graph: ModelBuilder, architecture: VisionArchitecture, windows: _Windows, x: ir.Value
) -> ir.Value:
    """Add attention within windows, x [P,hidden] -> [P,hidden].

    Every patch attends to the patches of its window. Places without a patch compute what no other place
    reads.
    """
    config = architecture.config
    hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
    with graph.module("attn"):
        qkv = queries_keys_values(graph, config, x, architecture.qkv)
        qkv = graph.op("Gather", qkv, windows.index, axis=0)
        qkv = graph.transpose(graph.reshape(qkv, [0, 0, 3 * heads, head_dim]), (0, 2, 1, 3))
        q, k, v = graph.split(qkv, [heads, heads, heads], axis=1)
        q, k = (graph.op("RotaryEmbedding", part, windows.cos, windows.sin) for part in (q, k))
        attended = graph.op("Attention", q, k, v, windows.mask, scale=head_dim**-0.5)
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [-1, hidden])
        attended = graph.op("Gather", attended, windows.patch_index, axis=0)
        return graph.linear("proj", attended, hidden, hidden, bias=True)
