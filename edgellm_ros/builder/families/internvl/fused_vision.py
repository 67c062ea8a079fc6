# SPDX-License-Identifier: Apache-2.0
"""Describes InternVL's vision tower and projector: `visual/fused.json`."""

from __future__ import annotations

from edgellm_ros.builder.families.internvl.vision import PROJECTOR_EPSILON, VisionArchitecture
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.lowering.fused import StoredWeights
from edgellm_ros.fused.description.decoder import StoredWeight
from edgellm_ros.fused.description.vision import FusedMerger, FusedVisionBlock, FusedVisionModel

LAYERS = "attention.qkv", "attention.projection_layer", "mlp.fc1", "mlp.fc2"


def describe_vision(
    architecture: VisionArchitecture, graph: GraphBuilder, file: str
) -> FusedVisionModel | None:
    """Describe `visual/model.onnx`, built by `build_vision` and saved as `file`.

    None for what the kernels do not take: RMSNorms, norms of queries and keys, a norm after the last layer,
    and quantised layers.
    """
    if architecture.rms_norms or architecture.qk_norms or architecture.last_norm:
        return None
    stored, depth = StoredWeights(graph, file), architecture.config.depth
    tower = f"{architecture.prefix}vision_tower"
    projector, embeddings = f"{architecture.prefix}multi_modal_projector", f"{tower}.embeddings"
    modules = [f"{tower}.encoder.layer.{i}" for i in range(depth)]
    layers = [f"{module}.{name}" for module in modules for name in LAYERS]
    layers += [f"{projector}.linear_{i}" for i in (1, 2)]
    layers.append(f"{embeddings}.patch_embeddings.projection")
    if not all(stored.has(f"{layer}.weight") for layer in layers):
        return None

    def block(module: str) -> FusedVisionBlock:
        def weight(name: str, kind: str = "weight") -> StoredWeight:
            return stored.place(f"{module}.{name}.{kind}")

        return FusedVisionBlock(
            norm1=weight("layernorm_before"),
            norm1_bias=weight("layernorm_before", "bias"),
            qkv=weight("attention.qkv"),
            qkv_bias=weight("attention.qkv", "bias") if architecture.qkv_bias else None,
            proj=weight("attention.projection_layer"),
            proj_bias=weight("attention.projection_layer", "bias"),
            norm2=weight("layernorm_after"),
            norm2_bias=weight("layernorm_after", "bias"),
            fc1=weight("mlp.fc1"),
            fc1_bias=weight("mlp.fc1", "bias"),
            fc2=weight("mlp.fc2"),
            fc2_bias=weight("mlp.fc2", "bias"),
        )

    return FusedVisionModel(
        file=stored.file,
        intermediate_size=architecture.intermediate_size,
        epsilon=architecture.epsilon,
        merger_epsilon=PROJECTOR_EPSILON,
        patch_embed=stored.place(f"{embeddings}.patch_embeddings.projection.weight"),
        patch_embed_bias=None,
        positions=stored.place(f"{embeddings}.added"),
        blocks=tuple(map(block, modules)),
        merger=FusedMerger(
            norm=stored.place(f"{projector}.layer_norm.weight"),
            norm_bias=stored.place(f"{projector}.layer_norm.bias"),
            first=stored.place(f"{projector}.linear_1.weight"),
            first_bias=stored.place(f"{projector}.linear_1.bias"),
            second=stored.place(f"{projector}.linear_2.weight"),
            second_bias=stored.place(f"{projector}.linear_2.bias"),
        ),
        deepstack_mergers=(),
    )
