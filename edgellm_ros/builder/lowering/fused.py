# SPDX-License-Identifier: Apache-2.0
"""Describes a dense decoder for the fused kernels: `llm/fused.json`."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.lowering.options import LLMOptions
from edgellm_ros.builder.model.decoder import Attention, Decoder, Layer, SwiGLU
from edgellm_ros.builder.quantization.matrix import FLOAT8
from edgellm_ros.fused.description.decoder import (
    FusedLayer,
    FusedModel,
    QuantizedMatrices,
    QuantizedMatrix,
    StoredWeight,
)

MOST_ORDERED = 1 << 16  # inputs of a matrix with act-order, whose perm has 16 bits per element
MATRICES = {  # modules by kernel
    "qkv": "self_attn.qkv_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}


def has_fused_kernels(decoder: Decoder) -> bool:
    """Return whether the fused kernels have all blocks of a decoder.

    The layers are attention with RoPE and SwiGLU, as those of Llama; recurrent layers, gates of attention and
    shifted norms have no fused kernels.
    """
    return not decoder.norm.shift and all(map(_is_fused, decoder.layers))


def _is_fused(layer: Layer) -> bool:
    blocks = [residual.block for residual in layer]
    if len(blocks) != 2 or not isinstance(blocks[0], Attention) or not isinstance(blocks[1], SwiGLU):
        return False
    return blocks[0].rope and not blocks[0].gated


def inner_size(decoder: Decoder) -> int:
    """Return the width of the feed-forward blocks, which is one for all layers."""
    (inner,) = {block.inner for block in decoder.blocks if isinstance(block, SwiGLU)}
    return inner


class Undescribed(Exception):
    """The fused kernels cannot run a model; the text tells why."""


def describe_decoder(
    decoder: Decoder,
    options: LLMOptions,
    graph: tuple[GraphBuilder, str],
    cuda: tuple[GraphBuilder, str],
) -> FusedModel:
    """Describe a language model that `has_fused_kernels`.

    graph: `llm/model.onnx`, which `build_llm` built, and the name of its file; cuda: the same of
    `build_cuda_llm`, which has the quantised weights.
    """
    head = options.head
    tied = head.is_embedding and head.vocab_map is None and not head.as_input
    stored = StoredWeights(*graph)
    weight = stored.place
    modules = [f"{decoder.prefix}.layers.{i}" for i in range(len(decoder.layers))]
    quantized: tuple[QuantizedMatrices, ...] = ()
    layers: tuple[FusedLayer, ...] = ()
    problem = None
    try:
        quantized = _quantized(decoder, modules, StoredWeights(*cuda, suffix=".packed"))
        layers = tuple(
            describe_layer(layer, options.capacity, modules[i], weight, quantized[i : i + 1])
            for i, layer in enumerate(decoder.layers)
        )
    except Undescribed as reason:
        quantized, problem = (), str(reason)
    return FusedModel(
        problem=problem,
        file=stored.file,
        intermediate_size=inner_size(decoder),
        epsilon=decoder.norm.epsilon,
        activation="silu",
        rope_interleaved=False,
        tied=tied,
        layers=layers,
        quantized=quantized,
        norm=weight(f"{decoder.prefix}.{decoder.last_norm}.weight"),
        lm_head=None if tied or head.as_input else weight(head.tensor),
    )


class StoredWeights:
    """Offsets of a graph's weights in the one file that has them.

    file: name of the graph's file; prefix, suffix: select weights by their names. ValueError if these are in
    several files, or if there are none and no suffix is given.
    """

    def __init__(self, graph: GraphBuilder, file: str, prefix: str = "", suffix: str = "") -> None:
        self.graph, self._stored = graph, graph.stored_weights(file)
        names = [name for name in self._stored if name.startswith(prefix) and name.endswith(suffix)]
        files = {self._stored[name][0] for name in names}
        if len(files) != 1 and (files or not suffix):
            raise ValueError(f"{file} has weights in {sorted(files)}, expected one file")
        self.file = files.pop() if files else ""

    def place(self, name: str) -> StoredWeight:
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
    layer: Layer,
    capacity: int,
    module: str,
    weight: Callable[[str], StoredWeight],
    quantized: tuple[QuantizedMatrices, ...] = (),
) -> FusedLayer:
    """Describe a layer, which is attention and SwiGLU.

    module: prefix of the names of its weights; quantized: the layer's quantised matrices, if there are any.
    """
    first, second = layer
    attention, mlp = first.block, second.block
    assert isinstance(attention, Attention)
    assert isinstance(mlp, SwiGLU)
    others = {name for matrices in quantized for name, _ in matrices.given()}

    def given(name: str, wanted: bool) -> StoredWeight | None:
        return weight(f"{module}.{name}") if wanted else None

    def matrix(name: str) -> StoredWeight | None:
        return given(f"{MATRICES[name]}.weight", name not in others)

    norms, mlp_bias = attention.head_norms, mlp.bias
    return FusedLayer(
        window=attention.window_in(capacity),
        input_norm=weight(f"{module}.{first.norm}.weight"),
        qkv=matrix("qkv"),
        qkv_bias=given("self_attn.qkv_proj.bias", attention.qkv_bias),
        q_norm=given("self_attn.q_norm.weight", norms),
        k_norm=given("self_attn.k_norm.weight", norms),
        o=matrix("o"),
        o_bias=given("self_attn.o_proj.bias", attention.output_bias),
        post_norm=weight(f"{module}.{second.norm}.weight"),
        gate_up=matrix("gate_up"),
        gate_up_bias=given("mlp.gate_up_proj.bias", mlp_bias),
        down=matrix("down"),
        down_bias=given("mlp.down_proj.bias", mlp_bias),
    )


def _quantized(decoder: Decoder, modules: list[str], stored: StoredWeights) -> tuple[QuantizedMatrices, ...]:
    """Describe all layers' quantised matrices, () if there are none.

    stored: weights of the graph for CUDA. Undescribed if the kernels do not take a matrix.
    """
    llm = decoder.config
    sizes = {
        "qkv": llm.hidden_size,
        "o": llm.num_attention_heads * llm.head_dim,
        "gate_up": llm.hidden_size,
        "down": inner_size(decoder),
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
    """Describe a matrix; None if it is not quantised.

    Undescribed if the kernels do not take it.
    """
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
