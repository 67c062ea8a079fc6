# SPDX-License-Identifier: Apache-2.0
"""Graph of the vision tower of Eagle, which is that of GR00T N1.6.

The tower is a SigLIP 2 for images of any size: patches are rows of one image, and the positions of a learned
grid are resampled to the image's grid. Four patches become one row of the language model.

Source of the model: NVIDIA Isaac-GR00T, branch n1.6-release, Eagle-Block2A-2B-v2 (modeling_siglip2.py,
modeling_eagle3_vl.py), without windows and rotary positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.siglip import SiglipLayers, siglip_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.multimodal.vision_config import Siglip2VisionConfig

CONNECTOR_EPSILON = 1e-5


@dataclass(frozen=True)
class EagleTower:
    """Vision tower and connector."""

    config: Siglip2VisionConfig  # for the runtime; the graph uses all sizes
    layers: SiglipLayers
    prefix: str  # of the tower's tensors
    connector: str  # of the connector's tensors


# pixel_values -- patch_embedding --(+)-- layers -- merge -- mlp1 -- image_embeds
#        pos_embed_shares -- position_embedding
def build_eagle_vision(tower: EagleTower, weights: Weights, precision: str) -> ModelBuilder:
    """Build `visual/model.onnx`.

    P patches of one image, merge block by merge block.

    Inputs:
    - pixel_values [P,C*p*p] fp32, normalised
    - pos_embed_shares [P,N] fp32: of the N points of the learned position grid in each patch

    Output: image_embeds [R,H] in the precision's type, one row per merge block: R = P/m^2.
    """
    graph = ModelBuilder("visual", weights, precision)
    config, hidden = tower.config, tower.config.hidden_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["P", config.patch_dim])
    shares = graph.input(names.POS_EMBED_SHARES, FLOAT, ["P", config.num_position_embeddings])
    with graph.module(tower.prefix, nodes=""):
        with graph.module("embeddings"):
            x = _patch_embedding(graph, config, graph.from_fp32(pixels))
            with graph.module("position_embedding"):
                table = graph.tensor("weight", config.num_position_embeddings, hidden)
                x = graph.op("Add", x, graph.op("MatMul", graph.from_fp32(shares), table))
        x = siglip_layers(graph, tower.layers, graph.op("Unsqueeze", x, graph.constant([0])))
    merged, out_size = config.patches_per_token * hidden, config.out_hidden_size
    with graph.module(tower.connector, nodes="connector"):
        # the values of a merge block's patches alternate
        x = graph.transpose(graph.reshape(x, [-1, config.patches_per_token, hidden]), (0, 2, 1))
        x = graph.layer_norm("0", graph.reshape(x, [-1, merged]), merged, CONNECTOR_EPSILON)
        x = graph.op("Gelu", graph.linear("1", x, merged, out_size, bias=True), approximate="none")
        x = graph.linear("3", x, out_size, out_size, bias=True)
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", out_size])
    return graph


def _patch_embedding(graph: ModelBuilder, config: Siglip2VisionConfig, x: ir.Value) -> ir.Value:
    """Add the product of patches [P,C*p*p] -> [P,hidden].

    The checkpoint's matrix has the colours of a pixel side by side; the runtime's patches have them apart.
    """
    hidden, patch, colours = config.hidden_size, config.patch_size, config.in_channels
    with graph.module("patch_embedding"):
        stored, weights = graph.full_name("weight"), graph.weights
        weights.require(stored, (hidden, config.patch_dim))

        def read() -> np.ndarray:
            pixels = weights.read(stored).reshape(hidden, patch * patch, colours)
            return pixels.transpose(0, 2, 1).reshape(hidden, config.patch_dim).T

        x = graph.op("MatMul", x, graph.weight(stored, (config.patch_dim, hidden), read))
        return graph.op("Add", x, graph.tensor("bias", hidden))
