# SPDX-License-Identifier: Apache-2.0
"""Describes a dense decoder for the fused kernels: `llm/fused.json`."""

from __future__ import annotations

from collections.abc import Callable

from edgellm_ros.builder.decoder import DecoderArchitecture
from edgellm_ros.builder.graph import GraphBuilder
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.engine_directory.fused_model import FusedLayer, FusedModel, StoredWeight


def describe_decoder(
    architecture: DecoderArchitecture, options: LLMOptions, graph: GraphBuilder, file: str
) -> FusedModel:
    """Describe `llm/model.onnx`, which `build_decoder` built and which is saved as `file`."""
    head = options.head
    tied = head.is_embedding and head.vocab_map is None and not head.as_input
    stored, folder = StoredWeights(graph, file), f"{architecture.prefix}.layers"
    weight = stored.place
    return FusedModel(
        file=stored.file,
        intermediate_size=architecture.intermediate_size,
        epsilon=architecture.epsilon,
        activation="silu",
        rope_interleaved=False,
        tied=tied,
        layers=tuple(
            describe_layer(architecture, i, options.capacity, f"{folder}.{i}", weight)
            for i in range(architecture.runner.num_hidden_layers)
        ),
        norm=weight(f"{architecture.prefix}.norm.weight"),
        lm_head=None if tied or head.as_input else weight(head.tensor),
    )


class StoredWeights:
    """Places of a graph's weights, which are in one file.

    file: name of the graph's file; prefix: of the names of the weights that are meant. ValueError if these
    are in several files.
    """

    def __init__(self, graph: GraphBuilder, file: str, prefix: str = "") -> None:
        self._graph, self._stored = graph, graph.stored_weights(file)
        files = {place for name, (place, _) in self._stored.items() if name.startswith(prefix)}
        if len(files) != 1:
            raise ValueError(f"{file} has weights in {sorted(files)}, expected one file")
        self.file = files.pop()

    def place(self, name: str) -> StoredWeight:
        """Return the place of a weight."""
        shape = self._graph.graph.initializers[name].shape
        assert shape is not None
        return StoredWeight(name, self._stored[name][1], tuple(shape.numpy()))


def describe_layer(
    architecture: DecoderArchitecture,
    layer: int,
    capacity: int,
    module: str,
    weight: Callable[[str], StoredWeight],
) -> FusedLayer:
    """Describe a layer whose weights have names that begin with `module`."""
    def given(name: str, wanted: bool) -> StoredWeight | None:
        return weight(f"{module}.{name}") if wanted else None

    norms, mlp_bias = architecture.head_norms, architecture.mlp_bias
    return FusedLayer(
        window=architecture.window(layer, capacity),
        input_norm=weight(f"{module}.input_layernorm.weight"),
        qkv=weight(f"{module}.self_attn.qkv_proj.weight"),
        qkv_bias=given("self_attn.qkv_proj.bias", architecture.qkv_bias),
        q_norm=given("self_attn.q_norm.weight", norms),
        k_norm=given("self_attn.k_norm.weight", norms),
        o=weight(f"{module}.self_attn.o_proj.weight"),
        o_bias=given("self_attn.o_proj.bias", architecture.output_bias),
        post_norm=weight(f"{module}.post_attention_layernorm.weight"),
        gate_up=weight(f"{module}.mlp.gate_up_proj.weight"),
        gate_up_bias=given("mlp.gate_up_proj.bias", mlp_bias),
        down=weight(f"{module}.mlp.down_proj.weight"),
        down_bias=given("mlp.down_proj.bias", mlp_bias),
    )
