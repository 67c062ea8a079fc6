# SPDX-License-Identifier: Apache-2.0
"""A decoder's weights in one device buffer that kernels and ONNX Runtime share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.choices import FP8
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import NUM_BASE_STATES
from edgellm_ros.engine_directory.recurrent_config import GATED_DELTA_NET, RecurrentConfig, state_columns
from edgellm_ros.fused.description.decoder import FusedLayer, FusedModel, StoredWeight
from edgellm_ros.fused.description.draft import FusedDraftModel, StoredFusion
from edgellm_ros.fused.description.expert import FusedExpertModel
from edgellm_ros.fused.description.vision import FusedVisionModel

if TYPE_CHECKING:
    from edgellm_ros.fused.fusion import StateFusion
    from edgellm_ros.fused.plan.fusion import FusionShape
    from edgellm_ros.fused.plan.quantized import Quantized
    from edgellm_ros.fused.plan.shape import Forms, FusedShape, RecurrentShape
    from edgellm_ros.fused.weights import FusedWeights

ALIGNMENT = 256  # bytes, of each weight's address


def load_weights(
    folder: Path,
    model: FusedModel | FusedExpertModel | FusedDraftModel | FusedVisionModel | StoredFusion,
    dtype: np.dtype,
    device: Device,
) -> dict[str, Tensor]:
    """Copy the weights from their files to the device; return them by name.

    Values, scales, zero points or offsets, and order of a quantised matrix follow each other in memory, each
    from a multiple of ALIGNMENT on: a kernel gets one address. ValueError if a file does not fit the model's
    description.
    """
    kept: set[str] = set()  # in fp32 on the device too
    if isinstance(model, FusedModel):
        mixers = (layer.mixer for layer in model.layers if layer.mixer is not None)
        kept = {weight.name for mixer in mixers for weight in mixer.weights()}
    float32 = np.dtype(np.float32)
    stored = [
        _Piece(weight, model.file, float32 if weight.fp32 else dtype, None if weight.name in kept else dtype)
        for weight in model.weights()
    ]
    if isinstance(model, FusedModel):
        stored += _quantized_pieces(model, dtype)
    places, total = [], 0
    for piece in stored:
        _check_file(folder / piece.file, piece)
        places.append(total)
        total += -(-piece.device_bytes // ALIGNMENT) * ALIGNMENT
    buffer = device.empty((total,), np.uint8)
    names = dict.fromkeys(piece.file for piece in stored)
    files = {name: np.memmap(folder / name, np.uint8, "r") for name in names}
    tensors = {}
    for piece, place in zip(stored, places, strict=True):
        weight, target = piece.weight, buffer.rows(place, place + piece.device_bytes)
        contents = files[piece.file][weight.offset : weight.offset + piece.nbytes]
        if piece.is_order:
            device.upload(target, inputs_and_places(contents))
            continue
        if piece.on_device != piece.dtype:
            contents = contents.view(piece.dtype).astype(piece.on_device).view(np.uint8)
        device.upload(target, contents)
        array = None if target.array is None else target.array.view(piece.on_device).reshape(weight.shape)
        tensors[weight.name] = Tensor(target.pointer, weight.shape, piece.on_device, target.owner, array)
    device.synchronize()  # ONNX Runtime may read the weights on another stream, or pack them on the host
    return tensors


def inputs_and_places(order: np.ndarray) -> np.ndarray:
    """Convert the bytes of an order, int64 [K], to the kernels' perm and inv_perm.

    Both have 16 bits per element, as bytes.
    """
    inputs = order.view(np.int64)
    return np.concatenate([inputs, np.argsort(inputs)]).astype(np.uint16).view(np.uint8)


def owners_of(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return the objects that keep the memory of tensors alive, each once."""
    return tuple({id(tensor.owner): tensor.owner for tensor in tensors.values()}.values())


def address_in(tensors: Mapping[str, Tensor], weight: StoredWeight | None) -> int:
    """Return the address of a weight on the device; 0 if there is none."""
    return 0 if weight is None else tensors[weight.name].pointer


def fused_shape(
    config: EngineConfig,
    model: FusedModel,
    most_rows: int,
    adapts: bool,
    last_states: bool = False,
    state_layers: tuple[int, ...] | None = None,
) -> FusedShape:
    """Return the shape of an engine's decoder.

    most_rows: most tokens of a step, over all sequences; adapts: whether sequences may have LoRA adapters;
    last_states: see `FusedShape`; state_layers: of the outputs `hidden_states_i`, None = those of the
    configuration.
    """
    from edgellm_ros.fused.plan.quantized import Quantized
    from edgellm_ros.fused.plan.shape import MOST_LORA_RANK, FusedShape

    llm = config.llm
    first = next(layer for layer in model.layers if layer.has_attention)
    kinds, layer_kinds = _kinds(model)
    recurrent = None if llm.recurrent is None else _recurrent_shape(llm.recurrent, model)
    adapts = adapts and recurrent is None
    return FusedShape(
        dtype=config.precision,
        layers=llm.num_hidden_layers,
        hidden=llm.hidden_size,
        heads=llm.num_attention_heads,
        kv_heads=llm.num_key_value_heads,
        head_dim=llm.head_dim,
        inner=model.intermediate_size,
        vocab=llm.output_vocab_size,
        rotary_dim=llm.rope.rotary_dim if model.rope else 0,
        capacity=config.max_kv_cache_capacity,
        **model.values(),
        qk_norm=first.q_norm is not None,
        qkv_bias=first.qkv_bias is not None,
        o_bias=first.o_bias is not None,
        mlp_bias=any(layer.down_bias is not None for layer in model.layers),
        activation=model.activation,
        windows=tuple(layer.window for layer in model.layers),
        tied=model.tied,
        max_rows=most_rows,
        hidden_state_layers=config.hidden_state_layers if state_layers is None else state_layers,
        last_states=last_states,
        quantized=kinds[0],
        other_kinds=tuple(kinds[1:]),
        layer_kinds=layer_kinds,
        head=None if model.quantized_head is None else Quantized(*model.quantized_head.form),
        lora_rank=min(config.max_supported_lora_rank, MOST_LORA_RANK) if adapts else 0,
        fp8_cache=config.kv_cache_type == FP8,
        recurrent=recurrent,
        attention_layers=llm.num_attention_layers,
        head_columns=0 if model.lm_head is None else model.lm_head.shape[1],
    )


def _recurrent_shape(recurrent: RecurrentConfig, model: FusedModel) -> RecurrentShape:
    from edgellm_ros.fused.plan.shape import RecurrentShape

    key_dim, values = recurrent.key_dim, recurrent.num_heads * recurrent.value_dim
    return RecurrentShape(
        delta_net=recurrent.kind == GATED_DELTA_NET,
        heads=recurrent.num_heads,
        key_heads=(recurrent.conv_dim - values) // (2 * key_dim),
        key_dim=key_dim,
        value_dim=recurrent.value_dim,
        conv_kernel=recurrent.conv_kernel,
        state_columns=state_columns(recurrent.value_dim),
        conv_bias=any(
            layer.mixer is not None and layer.mixer.conv_bias is not None for layer in model.layers
        ),
    )


def fused_weights(model: FusedModel, tensors: dict[str, Tensor]) -> FusedWeights:
    """Return the addresses of weights on the device."""
    from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights

    address = partial(address_in, tensors)
    layers = []
    for i, layer in enumerate(model.layers):
        weights = layer_addresses(layer, tensors)
        for matrices in model.quantized[i : i + 1]:
            weights |= {name: address(matrix.values) for name, matrix in matrices.given()}
        layers.append(FusedLayerWeights(**weights))
    head = model.lm_head if model.quantized_head is None else model.quantized_head.values
    return FusedWeights(tuple(layers), address(model.norm), address(head), owners_of(tensors))


def layer_addresses(layer: FusedLayer, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the addresses of a layer's weights by field of `FusedLayerWeights`.

    0 of those it lacks.
    """
    parts = (layer,) if layer.mixer is None else (layer, layer.mixer)
    weights = {name: value for part in parts for name, value in vars(part).items()}
    others = ("window", "mixer")
    return {name: address_in(tensors, value) for name, value in weights.items() if name not in others}


def fusion_shape(config: EngineConfig, fusion: StoredFusion, most_rows: int) -> FusionShape:
    """Return the shape of the fusion of an engine's draft head.

    most_rows: most tokens of a step.
    """
    from edgellm_ros.fused.plan.fusion import FusionShape

    assert config.draft is not None  # `check_drafting`
    return FusionShape(
        dtype=config.precision,
        state_size=config.hidden_size,
        fused_size=config.draft.hidden_size,
        epsilon=fusion.epsilon,
        state_norms=bool(fusion.state_norms),
        joined_norm=fusion.joined_norm is not None,
        max_rows=most_rows,
    )


def state_fusion(
    config: EngineConfig, fusion: StoredFusion, tensors: dict[str, Tensor], most_rows: int
) -> StateFusion:
    """Return the fusion of an engine's draft head; tensors: its weights on the device."""
    from edgellm_ros.fused.fusion import StateFusion
    from edgellm_ros.fused.weights import FusionWeights

    shape = fusion_shape(config, fusion, most_rows)
    norms = tuple(tensors[norm.name].pointer for norm in fusion.state_norms) or (0, 0, 0)
    if fusion.joined_norm is not None:
        joined = tensors[fusion.joined_norm.name]
        size = shape.state_size * joined.dtype.itemsize
        norms = tuple(joined.pointer + i * size for i in range(NUM_BASE_STATES))
    bias = address_in(tensors, fusion.fc_bias)
    low, middle, high = norms
    owners = tuple(tensors[weight.name].owner for weight in fusion.weights())
    weights = FusionWeights(tensors[fusion.fc.name].pointer, bias, (low, middle, high), owners)
    assert config.draft is not None  # `check_drafting`
    return StateFusion(config.draft.base_state_layers, shape, weights)


class _Piece(NamedTuple):
    """A weight, its file and its types in the file and on the device."""

    weight: StoredWeight
    file: str
    dtype: np.dtype
    rounded: np.dtype | None = None  # to this type on the device; None = to none
    is_order: bool = False

    @property
    def on_device(self) -> np.dtype:
        """Return the type on the device."""
        return self.rounded or self.dtype

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the file."""
        return self.weight.size * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """Return the number of bytes on the device."""
        return self.weight.size * (4 if self.is_order else self.on_device.itemsize)


def _quantized_pieces(model: FusedModel, dtype: np.dtype) -> Iterator[_Piece]:
    """Yield the weights of quantised matrices."""
    integers = np.dtype(np.uint8)
    for matrix in model.quantized_matrices():
        yield _Piece(matrix.values, matrix.file, integers)
        yield _Piece(matrix.scales, matrix.file, np.dtype(np.float32) if matrix.float8 else dtype)
        if matrix.zero_points is not None:
            yield _Piece(matrix.zero_points, matrix.file, integers)
        if matrix.offsets is not None:
            yield _Piece(matrix.offsets, matrix.file, dtype)
        if matrix.order is not None:
            yield _Piece(matrix.order, matrix.file, np.dtype(np.int64), is_order=True)


def _kinds(model: FusedModel) -> tuple[list[Forms], tuple[int, ...]]:
    """Return the kinds of layers by forms of their weights, and each layer's kind.

    Layers are of one kind if each kernel that both have takes the same form. A kind with quantised weights is
    the first, if there is one.
    """
    from edgellm_ros.fused.plan.quantized import Quantized

    if not model.quantized:
        return [()], ()
    kinds, of_layers = list[dict[str, Quantized | None]](), list[int]()
    for layer, matrices in zip(model.layers, model.quantized, strict=True):
        forms: dict[str, Quantized | None] = dict.fromkeys(layer.plain_matrices())
        forms |= {name: Quantized(*matrix.form) for name, matrix in matrices.given()}
        kind = next((each for each in kinds if _agree(each, forms)), None)
        if kind is None:
            kinds.append(kind := {})
        kind |= forms
        of_layers.append(kinds.index(kind))
    order = sorted(range(len(kinds)), key=lambda i: not any(kinds[i].values()))
    chosen = [tuple((name, form) for name, form in kinds[i].items() if form is not None) for i in order]
    return chosen, tuple(order.index(kind) for kind in of_layers)


def _agree(one: Mapping[str, Quantized | None], other: Mapping[str, Quantized | None]) -> bool:
    """Return whether each kernel that both have takes the same form."""
    return all(one[name] == form for name, form in other.items() if name in one)


def _check_file(path: Path, piece: _Piece) -> None:
    available, end = path.stat().st_size if path.is_file() else 0, piece.weight.offset + piece.nbytes
    if end > available:
        raise ValueError(
            f"{path} has {available} bytes, but {piece.weight.name} ends at {end}: export the engine again"
        )
