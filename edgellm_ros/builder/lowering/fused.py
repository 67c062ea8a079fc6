# SPDX-License-Identifier: Apache-2.0
"""Describes a decoder for the fused kernels: `llm/fused.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, GraphBuilder
from edgellm_ros.builder.graph.lm_head import LM_HEAD
from edgellm_ros.builder.lowering.options import LLMOptions
from edgellm_ros.builder.model.decoder import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Layer,
    SquaredReLU,
    SwiGLU,
)
from edgellm_ros.builder.model.recurrent import DeltaNet, Mamba2
from edgellm_ros.builder.quantization.matrix import FLOAT8
from edgellm_ros.fused.description.decoder import (
    FusedLayer,
    FusedMixer,
    FusedModel,
    QuantizedMatrices,
    QuantizedMatrix,
    StoredWeight,
)

MOST_ORDERED = 1 << 16  # inputs of a matrix with act-order, whose perm has 16 bits per element
PARTS = {  # linear layers by kernel, of an attention block, a recurrent mixer and a feed-forward block
    "qkv": "qkv_proj",
    "o": "o_proj",
    "in_proj": "in_proj",
    "out_proj": "out_proj",
    "gate_up": "gate_up_proj",
    "down": "down_proj",
}
MIXERS = Attention | DeltaNet | Mamba2


def has_fused_kernels(decoder: Decoder) -> bool:
    """Return whether the fused kernels have all blocks of a decoder.

    A layer is a mixer (attention, a gated delta net or Mamba2) and a feed-forward block, or one of them.
    Kernels are compiled for one form of each, and the first layer's mixer begins the residual stream.
    """
    mixers: set[DeltaNet | Mamba2] = set()
    forms: set[tuple[object, ...]] = set()
    for block in decoder.blocks:
        if isinstance(block, (DeltaNet, Mamba2)):
            mixers.add(block)
            if block.epsilon != decoder.norm.epsilon or (isinstance(block, Mamba2) and block.bias):
                return False
        elif isinstance(block, Attention):
            forms.add((Attention, block.rope, block.gated, block.head_norms))
        else:
            forms.add((FeedForward, block))
    kinds = [form[0] for form in forms]
    return (
        len(mixers) <= 1
        and kinds.count(Attention) == kinds.count(FeedForward) == 1
        and all(map(_is_fused, decoder.layers))
        and isinstance(decoder.layers[0][0].block, MIXERS)
    )


def _is_fused(layer: Layer) -> bool:
    mixers = [isinstance(residual.block, MIXERS) for residual in layer]
    return mixers in ([True, False], [True], [False])


def feed_forward_of(decoder: Decoder) -> SwiGLU | SquaredReLU:
    """Return the feed-forward block, which is the same in all layers."""
    (block,) = {block for block in decoder.blocks if isinstance(block, (SwiGLU, SquaredReLU))}
    return block


def inner_size(decoder: Decoder) -> int:
    """Return the width of the feed-forward blocks, which is one for all layers."""
    return feed_forward_of(decoder).inner


class Undescribed(Exception):
    """The fused kernels cannot run a model; the text tells why."""


def describe_decoder(
    decoder: Decoder,
    options: LLMOptions,
    graph: tuple[GraphBuilder, str],
    cuda: tuple[GraphBuilder, str],
) -> FusedModel:
    """Describe a language model for which `has_fused_kernels` is true.

    graph: `llm/model.onnx`, which `build_llm` built, and the name of its file; cuda: the same of
    `build_onnxruntime_llm`, which has the quantised weights.
    """
    head = options.head
    tied = head.is_shared_table
    stored = StoredWeights(*graph)
    weight = stored.place
    modules = [f"{decoder.prefix}.layers.{i}" for i in range(len(decoder.layers))]
    quantized: tuple[QuantizedMatrices, ...] = ()
    layers: tuple[FusedLayer, ...] = ()
    problem, packed = None, StoredWeights(*cuda, suffix=".packed")
    try:
        quantized = _quantized(decoder, modules, packed)
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
        activation="relu2" if isinstance(feed_forward_of(decoder), SquaredReLU) else "silu",
        rope=decoder.has_rope,
        rope_interleaved=False,
        attention_gate=any(isinstance(block, Attention) and block.gated for block in decoder.blocks),
        time_step_min=next(
            (block.time_step_min for block in decoder.blocks if isinstance(block, Mamba2)), 0.0
        ),
        tied=tied,
        layers=layers,
        quantized=quantized,
        norm=weight(f"{decoder.prefix}.{decoder.last_norm}.weight"),
        lm_head=None if tied or head.as_input or head.blocks is not None else weight(head.tensor),
        quantized_head=None if head.blocks is None else _matrix(LM_HEAD, head.hidden_size, packed),
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
        fp32 = self.dtype(name) == FLOAT != self.graph.dtype
        return StoredWeight(name, self._stored[name][1], tuple(shape.numpy()), fp32)

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
    """Describe a layer, which is a mixer and a feed-forward block, or one of them.

    module: prefix of the names of its weights; quantized: the layer's quantised matrices, if there are any.
    """
    others = {name for matrices in quantized for name, _ in matrices.given()}
    found: dict[str, StoredWeight | None] = dict.fromkeys(
        field.name for field in fields(FusedLayer) if field.name not in ("window", "mixer")
    )
    window, mixer = None, None
    for residual in layer:
        block, at = residual.block, f"{module}.{residual.module}"

        def given(name: str, wanted: bool, at: str = at) -> StoredWeight | None:
            return weight(f"{at}.{name}") if wanted else None

        def matrix(name: str, at: str = at, block: Block = block) -> StoredWeight | None:
            return given(f"{_part(name, block)}.weight", name not in others, at)

        norm = weight(f"{module}.{residual.norm}.weight")
        if isinstance(block, Attention):
            window = block.window_in(capacity)
            found |= {
                "input_norm": norm,
                "qkv": matrix("qkv"),
                "qkv_bias": given("qkv_proj.bias", block.qkv_bias),
                "q_norm": given("q_norm.weight", block.head_norms),
                "k_norm": given("k_norm.weight", block.head_norms),
                "o": matrix("o"),
                "o_bias": given("o_proj.bias", block.output_bias),
            }
        elif isinstance(block, (DeltaNet, Mamba2)):
            mamba = isinstance(block, Mamba2)
            found["input_norm"] = norm
            mixer = FusedMixer(
                in_proj=matrix("in_proj"),
                out_proj=matrix("out_proj"),
                taps=weight(f"{at}.conv1d.weight"),
                conv_bias=given("conv1d.bias", isinstance(block, Mamba2) and block.conv_bias),
                decay=weight(f"{at}.A_log.negative_exp"),
                dt_bias=weight(f"{at}.dt_bias"),
                skip=given("D", mamba),
                mixer_norm=weight(f"{at}.norm.weight"),
            )
        else:
            found |= {
                "post_norm": norm,
                "gate_up": matrix("gate_up"),
                "gate_up_bias": given(f"{_part('gate_up', block)}.bias", block.bias),
                "down": matrix("down"),
                "down_bias": given("down_proj.bias", block.bias),
            }
    return FusedLayer(window=window, mixer=mixer, **found)


def _part(kernel: str, block: Block) -> str:
    """Return the name of a kernel's linear layer in a block."""
    return "up_proj" if kernel == "gate_up" and isinstance(block, SquaredReLU) else PARTS[kernel]


def _sizes(decoder: Decoder, block: Block) -> dict[str, int]:
    """Return the rows of a block's matrices, by kernel."""
    llm = decoder.config
    if isinstance(block, Attention):
        return {"qkv": llm.hidden_size, "o": llm.num_attention_heads * llm.head_dim}
    if isinstance(block, (DeltaNet, Mamba2)):
        values = block.values if isinstance(block, DeltaNet) else block.inner
        return {"in_proj": llm.hidden_size, "out_proj": values}
    return {"gate_up": llm.hidden_size, "down": block.inner}


def _quantized(decoder: Decoder, modules: list[str], stored: StoredWeights) -> tuple[QuantizedMatrices, ...]:
    """Describe all layers' quantised matrices, () if there are none.

    stored: weights of the graph for CUDA. Undescribed if the kernels do not take a matrix.
    """
    found = []
    for module, layer in zip(modules, decoder.layers, strict=True):
        matrices: dict[str, QuantizedMatrix | None] = dict.fromkeys(PARTS)
        for residual in layer:
            for name, fan_in in _sizes(decoder, residual.block).items():
                full = f"{module}.{residual.module}.{_part(name, residual.block)}"
                matrices[name] = _matrix(full, fan_in, stored)
        found.append(QuantizedMatrices(**matrices))
    return tuple(found) if any(any(each.given()) for each in found) else ()


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
    points, order, offsets = f"{name}.packed_zero_point", f"{name}.packed_order", f"{name}.packed.offset"
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
        offsets=stored.place(offsets) if stored.has(offsets) else None,
    )
