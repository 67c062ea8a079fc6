# SPDX-License-Identifier: Apache-2.0
"""Describes an action expert for the fused kernels: `action/fused.json`."""

from __future__ import annotations

from edgellm_ros.builder.action.expert_config import PlainArchitecture
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.fused.description.decoder import StoredWeight
from edgellm_ros.fused.description.expert import FusedExpertLayer, FusedExpertModel, FusedTime


def describe_expert(architecture: PlainArchitecture, graph: GraphBuilder, file: str) -> FusedExpertModel:
    """Describe `action/model.onnx`, built by `build_expert` and saved as `file`."""
    stored = graph.stored_weights(file)

    def weight(name: str) -> StoredWeight:
        shape = graph.graph.initializers[name].shape
        assert shape is not None
        return StoredWeight(name, stored[name][1], tuple(shape.numpy()))

    def layer(module: str) -> FusedExpertLayer:
        return FusedExpertLayer(
            input_norm=weight(f"{module}.input_layernorm.weight"),
            qkv=weight(f"{module}.self_attn.qkv_proj.weight"),
            q_norm=weight(f"{module}.self_attn.q_norm.weight"),
            k_norm=weight(f"{module}.self_attn.k_norm.weight"),
            o=weight(f"{module}.self_attn.o_proj.weight"),
            post_norm=weight(f"{module}.post_attention_layernorm.weight"),
            gate_up=weight(f"{module}.mlp.gate_up_proj.weight"),
            down=weight(f"{module}.mlp.down_proj.weight"),
        )

    return FusedExpertModel(
        file=stored["in_proj.weight"][0],
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        epsilon=architecture.rms_norm_eps,
        time=FusedTime(
            min_period=architecture.time_min_period,
            max_period=architecture.time_max_period,
            first=weight("time_mlp.0.weight"),
            first_bias=weight("time_mlp.0.bias"),
            second=weight("time_mlp.2.weight"),
            second_bias=weight("time_mlp.2.bias"),
        ),
        in_proj=weight("in_proj.weight"),
        in_bias=weight("in_proj.bias"),
        layers=tuple(layer(f"layers.{i}") for i in range(architecture.num_hidden_layers)),
        norm=weight("norm.weight"),
        out_proj=weight("out_proj.weight"),
        out_bias=weight("out_proj.bias"),
    )
