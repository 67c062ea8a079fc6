# SPDX-License-Identifier: Apache-2.0
"""Describes the vision tower of Qwen3-VL: `visual/fused.json`."""

from __future__ import annotations

from edgellm_ros.builder.families.qwen3_vl.vision import EPSILON, VisionArchitecture
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.lowering.fused import StoredWeights
from edgellm_ros.fused.description.vision import FusedMerger, FusedVisionBlock, FusedVisionModel

BLOCK_LAYERS = "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"


def describe_vision(
    architecture: VisionArchitecture, graph: GraphBuilder, file: str
) -> FusedVisionModel | None:
    """Describe `visual/model.onnx`, built by `build_vision` and saved as `file`.

    None if layers are quantised, which the kernels do not take.
    """
    stored, prefix, names = StoredWeights(graph, file), architecture.prefix, architecture.names
    weight, config = stored.place, architecture.config
    levels = range(len(config.deepstack_visual_indexes))
    mergers = [f"{prefix}.merger", *(f"{prefix}.{names.deepstack}.{level}" for level in levels)]
    layers = [f"{prefix}.blocks.{i}.{name}" for i in range(config.depth) for name in BLOCK_LAYERS]
    layers += [f"{module}.{name}" for module in mergers for name in (names.first, names.second)]
    if not all(stored.has(f"{layer}.weight") for layer in layers):
        return None

    def block(module: str) -> FusedVisionBlock:
        return FusedVisionBlock(
            norm1=weight(f"{module}.norm1.weight"),
            norm1_bias=weight(f"{module}.norm1.bias"),
            qkv=weight(f"{module}.attn.qkv.weight"),
            qkv_bias=weight(f"{module}.attn.qkv.bias"),
            proj=weight(f"{module}.attn.proj.weight"),
            proj_bias=weight(f"{module}.attn.proj.bias"),
            norm2=weight(f"{module}.norm2.weight"),
            norm2_bias=weight(f"{module}.norm2.bias"),
            fc1=weight(f"{module}.mlp.linear_fc1.weight"),
            fc1_bias=weight(f"{module}.mlp.linear_fc1.bias"),
            fc2=weight(f"{module}.mlp.linear_fc2.weight"),
            fc2_bias=weight(f"{module}.mlp.linear_fc2.bias"),
        )

    def merger(module: str) -> FusedMerger:
        return FusedMerger(
            norm=weight(f"{module}.{names.norm}.weight"),
            norm_bias=weight(f"{module}.{names.norm}.bias"),
            first=weight(f"{module}.{names.first}.weight"),
            first_bias=weight(f"{module}.{names.first}.bias"),
            second=weight(f"{module}.{names.second}.weight"),
            second_bias=weight(f"{module}.{names.second}.bias"),
        )

    return FusedVisionModel(
        file=stored.file,
        intermediate_size=architecture.intermediate_size,
        epsilon=EPSILON,
        merger_epsilon=EPSILON,
        patch_embed=weight(f"{prefix}.patch_embed.proj.weight"),
        patch_embed_bias=weight(f"{prefix}.patch_embed.proj.bias"),
        positions=weight(f"{prefix}.pos_embed.weight"),
        blocks=tuple(block(f"{prefix}.blocks.{i}") for i in range(config.depth)),
        merger=merger(mergers[0]),
        deepstack_mergers=tuple(map(merger, mergers[1:])),
    )
