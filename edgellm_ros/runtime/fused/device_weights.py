# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder on the device, in one buffer that kernels and ONNX Runtime share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.draft_config import NUM_BASE_STATES
from edgellm_ros.engine_directory.fused_draft import FusedDraftModel, StoredFusion
from edgellm_ros.engine_directory.fused_expert import FusedExpertModel
from edgellm_ros.engine_directory.fused_model import FusedModel, StoredWeight

if TYPE_CHECKING:
    from edgellm_ros.kernels.cuda.fused.decoder import StateFusion
    from edgellm_ros.kernels.cuda.fused.fusion import FusionShape
    from edgellm_ros.kernels.cuda.fused.shape import FusedShape
    from edgellm_ros.kernels.cuda.fused.weights import FusedWeights

ALIGNMENT = 256  # bytes, of each weight's address


def load_weights(
    folder: Path,
    model: FusedModel | FusedExpertModel | FusedDraftModel | StoredFusion,
    dtype: np.dtype,
    device: Device,
) -> dict[str, Tensor]:
    """Copy the weights from their file to the device; return them by name.

    ValueError if the file does not fit the model's description.
    """
    path = folder / model.file
    stored = list(model.weights())
    sizes = [weight.size * dtype.itemsize for weight in stored]
    _check_file(path, stored, sizes)
    places, total = [], 0
    for nbytes in sizes:
        places.append(total)
        total += -(-nbytes // ALIGNMENT) * ALIGNMENT
    buffer, contents = device.empty((total,), np.uint8), np.memmap(path, np.uint8, "r")
    tensors = {}
    for weight, place, nbytes in zip(stored, places, sizes, strict=True):
        target = buffer.rows(place, place + nbytes)
        device.upload(target, contents[weight.offset : weight.offset + nbytes])
        array = None if target.array is None else target.array.view(dtype).reshape(weight.shape)
        tensors[weight.name] = Tensor(target.pointer, weight.shape, dtype, target.owner, array)
    device.synchronize()  # a session may read them on a stream of its own, or pack them on the host
    return tensors


def fused_shape(config: EngineConfig, model: FusedModel, most_rows: int) -> FusedShape:
    """Return the shape of an engine's decoder, for steps of at most `most_rows` tokens in all."""
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
        max_rows=most_rows,
        hidden_state_layers=config.hidden_state_layers,
    )


def fused_weights(model: FusedModel, tensors: dict[str, Tensor]) -> FusedWeights:
    """Return the addresses of weights on the device."""
    from edgellm_ros.kernels.cuda.fused.weights import FusedLayerWeights, FusedWeights

    def address(weight: StoredWeight | None) -> int:
        return 0 if weight is None else tensors[weight.name].pointer

    layers = tuple(
        FusedLayerWeights(
            **{name: address(value) for name, value in vars(layer).items() if name != "window"}
        )
        for layer in model.layers
    )
    owners = tuple({id(tensor.owner): tensor.owner for tensor in tensors.values()}.values())
    return FusedWeights(layers, address(model.norm), address(model.lm_head), owners)


def fusion_shape(config: EngineConfig, fusion: StoredFusion, most_rows: int) -> FusionShape:
    """Return the shape of the fusion of an engine's draft head, for steps of at most so many tokens."""
    from edgellm_ros.kernels.cuda.fused.fusion import FusionShape

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
    from edgellm_ros.kernels.cuda.fused.decoder import StateFusion
    from edgellm_ros.kernels.cuda.fused.fusion import FusionWeights

    shape = fusion_shape(config, fusion, most_rows)
    norms = tuple(tensors[norm.name].pointer for norm in fusion.state_norms) or (0, 0, 0)
    if fusion.joined_norm is not None:
        joined = tensors[fusion.joined_norm.name]
        size = shape.state_size * joined.dtype.itemsize
        norms = tuple(joined.pointer + i * size for i in range(NUM_BASE_STATES))
    bias = tensors[fusion.fc_bias.name].pointer if fusion.fc_bias is not None else 0
    low, middle, high = norms
    owners = tuple(tensors[weight.name].owner for weight in fusion.weights())
    weights = FusionWeights(tensors[fusion.fc.name].pointer, bias, (low, middle, high), owners)
    assert config.draft is not None  # `check_drafting`
    return StateFusion(config.draft.base_state_layers, shape, weights)


def _check_file(path: Path, stored: list[StoredWeight], sizes: list[int]) -> None:
    available = path.stat().st_size if path.is_file() else 0
    for weight, nbytes in zip(stored, sizes, strict=True):
        if weight.offset + nbytes > available:
            raise ValueError(
                f"{path} has {available} bytes, but {weight.name} ends at {weight.offset + nbytes}: "
                "export the engine again"
            )
