# SPDX-License-Identifier: Apache-2.0
"""Describes a dense decoder for the fused kernels: `llm/fused.json`."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.decoder import DecoderArchitecture
from edgellm_ros.builder.graph import DTYPES, GraphBuilder, Place
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.engine_directory.fused_model import (
    FusedLayer,
    FusedModel,
    Quantization,
    StoredMatrix,
    StoredWeight,
)

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {ir.DataType.UINT8: "uint8"}


class Undescribed(Exception):
    """The fused kernels cannot run a model; the text tells why."""


def describe_decoder(
    architecture: DecoderArchitecture, options: LLMOptions, graph: GraphBuilder, file: str
) -> FusedModel:
    """Describe `llm/model.cuda.onnx`, which `build_cuda_decoder` built and which is saved as `file`."""
    head = options.head
    tied = head.is_embedding and head.vocab_map is None and not head.as_input
    stored, folder = _Stored(graph, file), f"{architecture.prefix}.layers"
    layers, problem = [], None
    try:
        for i in range(architecture.runner.num_hidden_layers):
            layers.append(_layer(architecture, i, options.capacity, f"{folder}.{i}", stored))
        _check_alike(layers)
    except Undescribed as reason:
        layers, problem = [], str(reason)
    return FusedModel(
        problem=problem,
        intermediate_size=architecture.intermediate_size,
        epsilon=architecture.epsilon,
        activation="silu",
        rope_interleaved=False,
        tied=tied,
        layers=tuple(layers),
        norm=stored.weight(f"{architecture.prefix}.norm.weight"),
        lm_head=None if tied or head.as_input else stored.weight(head.tensor),
    )


class _Stored:
    """The weights of a graph and their places."""

    def __init__(self, graph: GraphBuilder, file: str) -> None:
        self._initializers, self._dtype = graph.graph.initializers, graph.dtype
        self._places: dict[str, Place] = graph.stored_weights(file)

    def weight(self, name: str) -> StoredWeight:
        """Describe a weight."""
        value = self._initializers[name]
        assert value.shape is not None
        assert value.dtype is not None
        file, offset = self._places[name]
        return StoredWeight(name, file, offset, DTYPE_NAMES[value.dtype], tuple(value.shape.numpy()))

    def given(self, name: str) -> StoredWeight | None:
        """Describe a weight; None if the graph lacks it."""
        return self.weight(name) if name in self._initializers else None

    def matrix(self, name: str, fan_in: int) -> StoredMatrix:
        """Describe the matrix of a product."""
        packed = self.given(f"{name}.packed")
        if packed is None:
            plain = self._initializers.get(f"{name}.weight")
            if plain is None:
                raise Undescribed(f"the layers of {name} are stored in different ways")
            if plain.dtype != self._dtype:
                raise Undescribed(f"{name} is stored as {plain.dtype} in a form without kernels")
            return StoredMatrix(self.weight(f"{name}.weight"), None)
        if f"{name}.order" in self._initializers:
            raise Undescribed(f"the inputs of {name} are sorted by their groups (act-order)")
        _, groups, nbytes = packed.shape
        group = fan_in // groups
        quantization = Quantization(
            bits=nbytes * 8 // group,
            group=group,
            scales=self.weight(f"{name}.packed_scale"),
            zero_points=self.given(f"{name}.packed_zero_point"),
        )
        return StoredMatrix(packed, quantization)


def _check_alike(layers: list[FusedLayer]) -> None:
    """Check that the matrices of all layers are of the same form: kernels are compiled for one."""
    for name in ("qkv", "o", "gate_up", "down"):
        forms = {_form(getattr(layer, name)) for layer in layers}
        if len(forms) > 1:
            raise Undescribed(f"{name} is quantised in {len(forms)} different ways in different layers")


def _form(matrix: StoredMatrix) -> tuple[int, ...]:
    found = matrix.quantized
    return () if found is None else (found.bits, found.group, int(found.zero_points is not None))


def _layer(
    architecture: DecoderArchitecture, layer: int, capacity: int, module: str, stored: _Stored
) -> FusedLayer:
    def given(name: str, wanted: bool) -> StoredWeight | None:
        return stored.weight(f"{module}.{name}") if wanted else None

    runner, norms, mlp_bias = architecture.runner, architecture.head_norms, architecture.mlp_bias
    hidden, queries = runner.hidden_size, runner.num_attention_heads * runner.head_dim
    return FusedLayer(
        window=architecture.window(layer, capacity),
        input_norm=stored.weight(f"{module}.input_layernorm.weight"),
        qkv=stored.matrix(f"{module}.self_attn.qkv_proj", hidden),
        qkv_bias=given("self_attn.qkv_proj.bias", architecture.qkv_bias),
        q_norm=given("self_attn.q_norm.weight", norms),
        k_norm=given("self_attn.k_norm.weight", norms),
        o=stored.matrix(f"{module}.self_attn.o_proj", queries),
        o_bias=given("self_attn.o_proj.bias", architecture.output_bias),
        post_norm=stored.weight(f"{module}.post_attention_layernorm.weight"),
        gate_up=stored.matrix(f"{module}.mlp.gate_up_proj", hidden),
        gate_up_bias=given("mlp.gate_up_proj.bias", mlp_bias),
        down=stored.matrix(f"{module}.mlp.down_proj", architecture.intermediate_size),
        down_bias=given("mlp.down_proj.bias", mlp_bias),
    )
