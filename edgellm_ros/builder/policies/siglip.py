# SPDX-License-Identifier: Apache-2.0
"""Layers of SigLIP's vision tower.

Policies on SmolVLM, PaliGemma and Eagle have it.

Source of the model: transformers, modeling_siglip.py and modeling_smolvlm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder


@dataclass(frozen=True)
class SiglipLayers:
    """Sizes of SigLIP's layers."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    depth: int
    epsilon: float


@dataclass(frozen=True)
class SiglipTower(SiglipLayers):
    """Sizes of SigLIP, for images of one size."""

    patch_size: int
    position_side: int  # positions of the learned grid, in each direction
    image_size: int  # pixels of a side of the images that the policy makes

    @property
    def side(self) -> int:
        """Return the number of patches of an image's side."""
        return self.image_size // self.patch_size


# pixels -- patch_embedding --(+)-- siglip_layers -->
#                          positions
def siglip_rows(graph: ModelBuilder, tower: SiglipTower, pixels: ir.Value, positions: np.ndarray) -> ir.Value:
    """Add the tower's rows [N,P,hidden] of images [N,3,side,side] fp32 from -1 to 1.

    positions [P]: the row of the learned grid for each patch. The names of tensors are those of the current
    module.
    """
    hidden, patch = tower.hidden_size, tower.patch_size
    with graph.module("embeddings"):
        x = graph.linear("patch_embedding", _patches(graph, tower, pixels), 3 * patch**2, hidden, bias=True)
        x = graph.op("Add", x, _positions(graph, tower, positions))
    return siglip_layers(graph, tower, x)


# x -- layers.0 -- ... -- layers.L-1 -- post_layernorm -->
def siglip_layers(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value) -> ir.Value:
    """Add the layers and the norm after them, over patches [N,P,hidden] of N images."""
    hidden = tower.hidden_size
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
    return graph.layer_norm("post_layernorm", x, hidden, tower.epsilon)


def _patches(graph: ModelBuilder, tower: SiglipTower, pixels: ir.Value) -> ir.Value:
    """Add the values of each patch, row by row.

    [N,3,S,S] fp32 -> [N,P,3*p*p] in the graph's type. Their product with the weights is a convolution whose
    stride is its size. It is no Conv, which ONNX Runtime's CUDA provider computes with cuDNN only.
    """
    side, patch = tower.side, tower.patch_size
    cells = graph.reshape(graph.from_fp32(pixels), [0, 3, side, patch, side, patch])
    return graph.reshape(graph.transpose(cells, (0, 2, 4, 1, 3, 5)), [0, side**2, 3 * patch**2])


def _positions(graph: ModelBuilder, tower: SiglipTower, rows: np.ndarray) -> ir.Value:
    """Add the learned positions of the patches [P,hidden], row by row."""
    full = graph.full_name("position_embedding.weight")
    graph.weights.require(full, (tower.position_side**2, tower.hidden_size))
    return graph.weight(full, (len(rows), tower.hidden_size), lambda: graph.weights.read(full)[rows])


# x --+-- q_proj --+
#     +-- k_proj --+-- Attention -- out_proj -->
#     +-- v_proj --+
def _attention(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value) -> ir.Value:
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
