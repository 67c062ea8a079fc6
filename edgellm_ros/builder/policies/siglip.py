# SPDX-License-Identifier: Apache-2.0
"""Layers of SigLIP's vision tower.

Policies on SmolVLM, PaliGemma and Eagle have it.

Source of the model: transformers, modeling_siglip.py and modeling_smolvlm.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.attention import attend_heads
from edgellm_ros.builder.graph.graph import ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.residual import NormSizes, add_norm, product


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
def siglip_rows(
    graph: ModelBuilder, tower: SiglipTower, pixels: ir.Value, positions: np.ndarray, cuda: bool = False
) -> ir.Value:
    """Add the tower's rows [N,P,hidden] of images [N,3,side,side] fp32 from -1 to 1.

    positions [P]: the row of the learned grid for each patch. The names of tensors are those of the current
    module. cuda: attention takes rows as the projections write them, and biases are added by the operators
    behind them, which are ONNX Runtime's own.
    """
    hidden, patch = tower.hidden_size, tower.patch_size
    with graph.module("embeddings"):
        x = graph.linear("patch_embedding", _patches(graph, tower, pixels), 3 * patch**2, hidden, bias=True)
        x = graph.op("Add", x, _positions(graph, tower, positions))
    return siglip_layers(graph, tower, x, cuda)


# x -- layers.0 -- ... -- layers.L-1 -- post_layernorm -->
def siglip_layers(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value, cuda: bool = False) -> ir.Value:
    """Add the layers and the norm after them, over patches [N,P,hidden] of N images.

    cuda: in the form for ONNX Runtime's CUDA provider.
    """
    hidden = tower.hidden_size
    sizes = NormSizes(hidden, tower.epsilon)
    attend, raise_rows = (_attention_cuda, _raised_cuda) if cuda else (_attention, _raised)
    normed = sizes.norm(graph, "encoder.layers.0.layer_norm1", x)
    for i in range(tower.depth):
        with graph.module(f"encoder.layers.{i}", nodes=f"layers.{i}"):
            with graph.module("self_attn"):
                update = product(graph, "out_proj", attend(graph, tower, normed), hidden, hidden)
            x, normed = add_norm(graph, sizes, "layer_norm2", x, update, cuda=cuda)
            raised = raise_rows(graph, tower, normed)
            update = product(graph, "mlp.fc2", raised, tower.intermediate_size, hidden)
        following = f"encoder.layers.{i + 1}.layer_norm1" if i + 1 < tower.depth else "post_layernorm"
        x, normed = add_norm(graph, sizes, following, x, update, cuda=cuda)
    return normed


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


# x -- qkv_proj --+-- q --+
#                 +-- k --+-- Attention -->
#                 +-- v --+
def _attention(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value) -> ir.Value:
    """Add attention among the patches of an image without its last projection.

    [N,P,hidden] -> the same.
    """
    heads, head_dim = tower.num_heads, tower.hidden_size // tower.num_heads
    return attend_heads(graph, _projections(graph, tower, x), heads, head_dim)


def _attention_cuda(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value) -> ir.Value:
    """Add `_attention` on rows as the projections write them."""
    heads, scale = tower.num_heads, (tower.hidden_size // tower.num_heads) ** -0.5
    parts = _projections(graph, tower, x)
    return graph.op("Attention", *parts, scale=scale, q_num_heads=heads, kv_num_heads=heads)


def _projections(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value) -> Sequence[ir.Value]:
    """Add queries, keys and values [N,P,hidden]."""
    hidden = tower.hidden_size
    return graph.linears("qkv_proj", {f"{name}_proj": hidden for name in "qkv"}, x, hidden, bias=True)


# x -- fc1 -- Gelu -->
def _raised(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value) -> ir.Value:
    """Add the inner rows [N,P,intermediate_size] of the feed-forward block."""
    raised = graph.linear("mlp.fc1", x, tower.hidden_size, tower.intermediate_size, bias=True)
    return graph.op("Gelu", raised, approximate="tanh")


def _raised_cuda(graph: ModelBuilder, tower: SiglipLayers, x: ir.Value) -> ir.Value:
    """Add `_raised` with the bias as an input of the activation."""
    raised = product(graph, "mlp.fc1", x, tower.hidden_size, tower.intermediate_size)
    return graph.ops("FastGelu", raised.rows, raised.bias, outputs=1, domain=ORT_DOMAIN)[0]
