# SPDX-License-Identifier: Apache-2.0
"""Describes a draft head for the fused kernels: `draft/fused.json`."""

from __future__ import annotations

from edgellm_ros.builder.draft.head import DraftHead, JoinedAttention, Projection
from edgellm_ros.builder.draft.layout import MODULE, layer
from edgellm_ros.builder.graph.fusion import Fusion
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.lowering.fused import StoredWeights, describe_layer, inner_size
from edgellm_ros.builder.model.decoder import Attention
from edgellm_ros.engine_directory.draft_config import NUM_BASE_STATES
from edgellm_ros.fused.description.draft import FusedDraftModel, StoredFusion, StoredProjection


def describe_head(
    head: DraftHead,
    lm_head: LMHead,
    capacity: int,
    draft: tuple[GraphBuilder, str],
    verify: tuple[GraphBuilder, str],
) -> FusedDraftModel:
    """Describe `draft/model.onnx`, and a fusion in `llm/verify.onnx`.

    `build_draft` built `draft/model.onnx`. draft, verify: the graphs, and the names of their files.
    """
    decoder, weights, entry, fusion, projection = head.decoder, StoredWeights(*draft), head.entry, None, None
    if isinstance(head.states, Fusion):
        fusion = _describe_fusion(head.states, StoredWeights(*verify, prefix=f"{MODULE}."))
    if isinstance(entry, Projection):
        norm, fc = (weights.place(f"{MODULE}.{name}.weight") for name in ("embedding_norm", "fc"))
        projection = StoredProjection(norm, fc, entry.state_first)
    state_norm = f"{MODULE}.hidden_norm" if projection else f"{layer(0)}.hidden_norm"
    return FusedDraftModel(
        file=weights.file,
        intermediate_size=inner_size(decoder),
        epsilon=decoder.norm.epsilon,
        norm_before_residual=isinstance(entry, JoinedAttention) and entry.norm_before_residual,
        attention_gate=any(isinstance(block, Attention) and block.gated for block in decoder.blocks),
        layers=tuple(
            describe_layer(each, capacity, layer(i), weights.place) for i, each in enumerate(decoder.layers)
        ),
        hidden_norm=weights.place(f"{state_norm}.weight"),
        norm=weights.place(f"{MODULE}.norm.weight"),
        lm_head=weights.place(lm_head.tensor),
        fusion=fusion,
        projection=projection,
    )


def _describe_fusion(fusion: Fusion, weights: StoredWeights) -> StoredFusion:
    norms = range(NUM_BASE_STATES if fusion.state_norms else 0)
    return StoredFusion(
        file=weights.file,
        epsilon=fusion.epsilon,
        fc=weights.place(f"{MODULE}.fc.weight"),
        fc_bias=weights.place(f"{MODULE}.fc.bias") if fusion.bias else None,
        state_norms=tuple(weights.place(f"{MODULE}.fc_norm.{i}.weight") for i in norms),
        joined_norm=weights.place(f"{MODULE}.input_norm.weight") if fusion.joined_norm else None,
    )
