# SPDX-License-Identifier: Apache-2.0
"""Graph of SmolVLA's vision tower: from camera images to rows of the prefix.

Source of the model: transformers, modeling_smolvlm.py, SmolVLMVisionTransformer and SmolVLMConnector;
LeRobot 0.4.4, SmolVLMWithExpertModel.embed_image.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.smolvla.architecture import VLM, SmolVLAArchitecture, TowerArchitecture
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names


# pixel_values -- patch_embedding --(+)-- layers.0 -- ... -- layers.L-1 -- post_layernorm
#                              positions                                        |
#                                          image_embeds -- proj -- blocks of merge x merge patches
def build_vision(architecture: SmolVLAArchitecture, weights: Weights, precision: str) -> ModelBuilder:
    """Build `visual/model.onnx`.

    Input: pixel_values [N,3,side,side] fp32, of N cameras, from -1 to 1.

    Output: image_embeds [R,H] in the precision's type: the rows of each camera, multiplied by the square root
    of H as the prefix has them.
    """
    graph = ModelBuilder("visual", weights, precision)
    tower, out_size = architecture.tower, architecture.llm.hidden_size
    hidden, patch, side = tower.hidden_size, tower.patch_size, tower.side
    size = tower.image_size
    pixels = graph.input(names.PIXEL_VALUES, FLOAT, ["N", 3, size, size])
    with graph.module(f"{VLM}.vision_model", nodes="vision_model"):
        with graph.module("embeddings"):
            with graph.module("patch_embedding"):
                kernel, bias = graph.tensor("weight", hidden, 3, patch, patch), graph.tensor("bias", hidden)
                strides = {"kernel_shape": [patch, patch], "strides": [patch, patch]}
                x = graph.op("Conv", graph.from_fp32(pixels), kernel, bias, **strides)
            x = graph.transpose(graph.reshape(x, [0, hidden, -1]), (0, 2, 1))
            x = graph.op("Add", x, _positions(graph, tower))
        for i in range(tower.depth):
            with graph.module(f"encoder.layers.{i}", nodes=f"layers.{i}"):
                normed = graph.layer_norm("layer_norm1", x, hidden, tower.epsilon)
                x = graph.op("Add", x, _attention(graph, tower, normed))
                normed = graph.layer_norm("layer_norm2", x, hidden, tower.epsilon)
                raised = graph.linear("mlp.fc1", normed, hidden, tower.intermediate_size, bias=True)
                raised = graph.op("Gelu", raised, approximate="tanh")
                x = graph.op(
                    "Add", x, graph.linear("mlp.fc2", raised, tower.intermediate_size, hidden, bias=True)
                )
        x = graph.layer_norm("post_layernorm", x, hidden, tower.epsilon)
    with graph.scope("connector"):
        merge, blocks = tower.merge, side // tower.merge
        x = graph.reshape(x, [-1, blocks, merge, blocks, merge, hidden])
        x = graph.reshape(graph.transpose(x, (0, 1, 3, 2, 4, 5)), [-1, merge * merge * hidden])
        stored = f"{VLM}.connector.modality_projection.proj.weight"
        weights.require(stored, (out_size, merge * merge * hidden))
        scale = math.sqrt(out_size)
        matrix = graph.weight(
            stored,
            (merge * merge * hidden, out_size),
            lambda: (weights.read(stored).astype(np.float32) * scale).T,
        )
        x = graph.op("MatMul", x, matrix)
    graph.output(x, names.IMAGE_EMBEDS, graph.dtype, ["R", out_size])
    return graph


def _positions(graph: ModelBuilder, tower: TowerArchitecture) -> ir.Value:
    """Add the learned positions of the patches [side*side,hidden], row by row.

    An image of another size than the grid's takes the positions at the same shares of its sides.
    """
    full, rows = graph.full_name("position_embedding.weight"), position_rows(tower)
    graph.weights.require(full, (tower.position_side**2, tower.hidden_size))
    return graph.weight(full, (len(rows), tower.hidden_size), lambda: graph.weights.read(full)[rows])


def position_rows(tower: TowerArchitecture) -> np.ndarray:
    """Compute the row of the learned grid for each patch of an image.

    Computed in fp32, as in the reference.
    """
    step, one = np.float32(1) / np.float32(tower.side), np.float32(1.0 - 1e-6)
    places = np.minimum(np.arange(tower.side, dtype=np.float32) * step, one)
    share = 1 / tower.position_side
    borders = np.arange(share, 1.0, share).astype(np.float32)
    cells = np.searchsorted(borders, places, side="right")
    return (cells[:, None] * tower.position_side + cells).reshape(-1)


# x --+-- q_proj --+
#     +-- k_proj --+-- Attention -- out_proj -->
#     +-- v_proj --+
def _attention(graph: ModelBuilder, tower: TowerArchitecture, x: ir.Value) -> ir.Value:
    """Add attention among the patches of an image: [N,P,hidden] -> the same."""
    hidden, heads = tower.hidden_size, tower.num_heads
    head_dim = hidden // heads
    with graph.module("self_attn"):
        rows = (graph.linear(f"{name}_proj", x, hidden, hidden, bias=True) for name in "qkv")
        q, k, v = (
            graph.transpose(graph.reshape(part, [0, 0, heads, head_dim]), (0, 2, 1, 3)) for part in rows
        )
        attended = graph.op("Attention", q, k, v, scale=head_dim**-0.5)
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [0, 0, hidden])
        return graph.linear("out_proj", attended, hidden, hidden, bias=True)
