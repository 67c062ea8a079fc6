# SPDX-License-Identifier: Apache-2.0
"""Describes a dense decoder for the fused kernels: `llm/fused.json`."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from edgellm_ros.builder.decoder import DecoderArchitecture
from edgellm_ros.builder.graph import GraphBuilder
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.builder.quantization.matrix import FLOAT8
from edgellm_ros.engine_directory.fused_model import (
    FusedLayer,
    FusedModel,
    QuantizedMatrices,
    QuantizedMatrix,
    StoredWeight,
)

MOST_ORDERED = 1 << 16  # inputs that 16 bits can number
MATRICES = {  # modules by kernel
    "qkv": "self_attn.qkv_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}


class Undescribed(Exception):
    """The fused kernels cannot run a model; the text tells why."""


def describe_decoder(
    architecture: DecoderArchitecture,
    options: LLMOptions,
    graph: tuple[GraphBuilder, str],
    cuda: tuple[GraphBuilder, str],
) -> FusedModel:
    """Describe a language model.

    graph: `llm/model.onnx`, which `build_decoder` built, and the name of its file; cuda: the same of
    `build_cuda_decoder`, which has the quantised weights.
    """
    head, runner = options.head, architecture.runner
    tied = head.is_embedding and head.vocab_map is None and not head.as_input
    stored, folder = StoredWeights(*graph), f"{architecture.prefix}.layers"
    weight = stored.place
    modules = [f"{folder}.{i}" for i in range(runner.num_hidden_layers)]
    quantized: tuple[QuantizedMatrices, ...] = ()
    layers: tuple[FusedLayer, ...] = ()
    problem = None
    try:
        quantized = _quantized(architecture, modules, StoredWeights(*cuda, suffix=".packed"))
        layers = tuple(
            describe_layer(architecture, i, options.capacity, module, weight, quantized[i : i + 1])
            for i, module in enumerate(modules)
        )
    except Undescribed as reason:
        quantized, problem = (), str(reason)
    return FusedModel(
        problem=problem,
        file=stored.file,
        intermediate_size=architecture.intermediate_size,
        epsilon=architecture.epsilon,
        activation="silu",
        rope_interleaved=False,
        tied=tied,
        layers=layers,
        quantized=quantized,
        norm=weight(f"{architecture.prefix}.norm.weight"),
        lm_head=None if tied or head.as_input else weight(head.tensor),
    )


class StoredWeights:
    """Places of a graph's weights, which are in one file.

    file: name of the graph's file; prefix, suffix: of the names of the weights that are meant. ValueError if
    these are in several files, or there are none without a suffix.
    """

    def __init__(self, graph: GraphBuilder, file: str, prefix: str = "", suffix: str = "") -> None:
        self.graph, self._stored = graph, graph.stored_weights(file)
        names = [name for name in self._stored if name.startswith(prefix) and name.endswith(suffix)]
        files = {self._stored[name][0] for name in names}
        if len(files) != 1 and (files or not suffix):
            raise ValueError(f"{file} has weights in {sorted(files)}, expected one file")
        self.file = files.pop() if files else ""

    def place(self, name: str) -> StoredWeight:
        """Return the place of a weight."""
        shape = self.graph.graph.initializers[name].shape
        assert shape is not None
        return StoredWeight(name, self._stored[name][1], tuple(shape.numpy()))

    def dtype(self, name: str) -> ir.DataType:
        """Return the type of a weight."""
        found = self.graph.graph.initializers[name].dtype
        assert found is not None
        return found

    def has(self, name: str) -> bool:
        """Return whether the graph has a weight of this name."""
        return name in self.graph.graph.initializers


def describe_layer(
    architecture: DecoderArchitecture,
    layer: int,
    capacity: int,
    module: str,
    weight: Callable[[str], StoredWeight],
    quantized: tuple[QuantizedMatrices, ...] = (),
) -> FusedLayer:
    """Describe a layer whose weights have names that begin with `module`.

    quantized: the layer's quantised matrices, if it has any.
    """
    others = {name for matrices in quantized for name, _ in matrices.given()}

    def given(name: str, wanted: bool) -> StoredWeight | None:
        return weight(f"{module}.{name}") if wanted else None

    def matrix(name: str) -> StoredWeight | None:
        return given(f"{MATRICES[name]}.weight", name not in others)

    norms, mlp_bias = architecture.head_norms, architecture.mlp_bias
    return FusedLayer(
        window=architecture.window(layer, capacity),
        input_norm=weight(f"{module}.input_layernorm.weight"),
        qkv=matrix("qkv"),
        qkv_bias=given("self_attn.qkv_proj.bias", architecture.qkv_bias),
        q_norm=given("self_attn.q_norm.weight", norms),
        k_norm=given("self_attn.k_norm.weight", norms),
        o=matrix("o"),
        o_bias=given("self_attn.o_proj.bias", architecture.output_bias),
        post_norm=weight(f"{module}.post_attention_layernorm.weight"),
        gate_up=matrix("gate_up"),
        gate_up_bias=given("mlp.gate_up_proj.bias", mlp_bias),
        down=matrix("down"),
        down_bias=given("mlp.down_proj.bias", mlp_bias),
    )


def _quantized(
    architecture: DecoderArchitecture, modules: list[str], stored: StoredWeights
) -> tuple[QuantizedMatrices, ...]:
    """Describe all layers' quantised matrices, () if there are none. Undescribed.

    stored: weights of the graph for CUDA.
    """
    runner = architecture.runner
    sizes = {
        "qkv": runner.hidden_size,
        "o": runner.num_attention_heads * runner.head_dim,
        "gate_up": runner.hidden_size,
        "down": architecture.intermediate_size,
    }
    found = [
        QuantizedMatrices(
            **{name: _matrix(f"{module}.{MATRICES[name]}", fan_in, stored) for name, fan_in in sizes.items()}
        )
        for module in modules
    ]
    for name in sizes:
        forms = {matrix and matrix.form for matrix in (getattr(layer, name) for layer in found)}
        if len(forms) > 1:  # kernels are compiled for one
            raise Undescribed(f"{name} is quantised in {len(forms)} different ways in different layers")
    return tuple(found) if any(True for _ in found[0].given()) else ()


def _matrix(name: str, fan_in: int, stored: StoredWeights) -> QuantizedMatrix | None:
    """Describe a quantised matrix; None if it is not quantised. Undescribed."""
    if not stored.has(f"{name}.packed"):
        plain = stored.graph.graph.initializers.get(f"{name}.weight")
        if plain is None:
            raise Undescribed(f"the layers of {name} are stored in different ways")
        if plain.dtype != stored.graph.dtype:
            raise Undescribed(f"{name} is stored as {plain.dtype} in a form without kernels")
        return None
    values = stored.place(f"{name}.packed")
    points, order = f"{name}.packed_zero_point", f"{name}.packed_order"
    _, groups, nbytes = values.shape
    if stored.has(order) and fan_in > MOST_ORDERED:
        raise Undescribed(f"{fan_in} inputs of {name} are sorted by their groups (act-order)")
    return QuantizedMatrix(
        file=stored.file,
        bits=nbytes * groups * 8 // fan_in,
        group=fan_in // groups,
        values=values,
        scales=stored.place(f"{name}.packed_scale"),
        zero_points=stored.place(points) if stored.has(points) else None,
        float8=stored.dtype(f"{name}.packed") == FLOAT8,
        order=stored.place(order) if stored.has(order) else None,
    )
