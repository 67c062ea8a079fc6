# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder on the device, in one buffer that kernels and ONNX Runtime share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor, bfloat16
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.fused_model import FusedLayer, FusedModel, StoredMatrix, StoredWeight

if TYPE_CHECKING:
    from edgellm_ros.kernels.cuda.fused.quantized import Quantized
    from edgellm_ros.kernels.cuda.fused.shape import FusedShape
    from edgellm_ros.kernels.cuda.fused.weights import FusedWeights

ALIGNMENT = 256  # bytes, of each weight's address


def load_weights(folder: Path, model: FusedModel, device: Device) -> dict[str, Tensor]:
    """Copy the weights from their files to the device; return them by name.

    Values, scales and zero points of a quantised matrix follow each other in memory: a kernel gets one
    address. ValueError if a file does not fit `llm/fused.json`.
    """
    stored = list(model.weights())
    files = {name: folder / name for name in dict.fromkeys(weight.file for weight in stored)}
    for weight in stored:
        _check_file(files[weight.file], weight)
    places, total = [], 0
    for weight in stored:
        places.append(total)
        total += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
    buffer = device.empty((total,), np.uint8)
    contents = {name: np.memmap(path, np.uint8, "r") for name, path in files.items()}
    tensors = {}
    for weight, place in zip(stored, places, strict=True):
        target, own = buffer.rows(place, place + weight.nbytes), element_type(weight.dtype)
        device.upload(target, contents[weight.file][weight.offset : weight.offset + weight.nbytes])
        array = None if target.array is None else target.array.view(own).reshape(weight.shape)
        tensors[weight.name] = Tensor(target.pointer, weight.shape, own, target.owner, array)
    device.synchronize()  # a session may read them on a stream of its own, or pack them on the host
    return tensors


def fused_shape(config: EngineConfig, model: FusedModel, most_rows: int) -> FusedShape:
    """Return the shape of an engine's decoder, for batches of at most `most_rows`."""
    from edgellm_ros.kernels.cuda.fused.shape import FusedShape

    llm, first = config.llm, model.layers[0]
    return FusedShape(
        dtype=config.precision,
        layers=llm.num_hidden_layers,
        hidden=llm.hidden_size,
        heads=llm.num_attention_heads,
        kv_heads=llm.num_key_value_heads,
        head_dim=llm.head_dim,
        inner=model.intermediate_size,
        vocab=llm.output_vocab_size,
        rotary_dim=llm.rope.rotary_dim,
        capacity=config.max_kv_cache_capacity,
        epsilon=model.epsilon,
        interleaved=model.rope_interleaved,
        qk_norm=first.q_norm is not None,
        qkv_bias=first.qkv_bias is not None,
        o_bias=first.o_bias is not None,
        mlp_bias=first.down_bias is not None,
        activation=model.activation,
        windows=tuple(layer.window for layer in model.layers),
        tied=model.tied,
        max_rows=min(config.max_supported_batch_size, most_rows),
        hidden_state_layers=config.hidden_state_layers,
        quantized=tuple(_forms(first)),
    )


def fused_weights(model: FusedModel, tensors: dict[str, Tensor]) -> FusedWeights:
    """Return the addresses of weights on the device."""
    from edgellm_ros.kernels.cuda.fused.weights import FusedLayerWeights, FusedWeights

    def address(weight: StoredWeight | StoredMatrix | None) -> int:
        first = weight.values if isinstance(weight, StoredMatrix) else weight
        return 0 if first is None else tensors[first.name].pointer

    layers = tuple(
        FusedLayerWeights(
            **{name: address(value) for name, value in vars(layer).items() if name != "window"}
        )
        for layer in model.layers
    )
    owners = tuple({id(tensor.owner): tensor.owner for tensor in tensors.values()}.values())
    return FusedWeights(layers, address(model.norm), address(model.lm_head), owners)


def element_type(name: str) -> np.dtype:
    """Return the type "fp16", "bf16" or "uint8"."""
    return bfloat16() if name == "bf16" else np.dtype({"fp16": np.float16, "uint8": np.uint8}[name])


def _forms(layer: FusedLayer) -> Iterator[tuple[str, Quantized]]:
    """Yield the forms of a layer's quantised matrices by kernel."""
    from edgellm_ros.kernels.cuda.fused.quantized import Quantized

    for name, matrix in vars(layer).items():
        found = matrix.quantized if isinstance(matrix, StoredMatrix) else None
        if found is not None:
            yield name, Quantized(found.bits, found.group, found.zero_points is not None)


def _check_file(path: Path, weight: StoredWeight) -> None:
    available, end = path.stat().st_size if path.is_file() else 0, weight.offset + weight.nbytes
    if end > available:
        raise ValueError(
            f"{path} has {available} bytes, but {weight.name} ends at {end}: export the engine again"
        )
