# SPDX-License-Identifier: Apache-2.0
"""FusedBackend: the fused kernels as an engine backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device, DeviceGraph
from edgellm_ros.engine.tensor import Tensor, bfloat16, float8
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import RecurrentConfig

if TYPE_CHECKING:
    from edgellm_ros.fused.plan.shape import FusedShape


class Decoder(Protocol):
    """What runs a step or a prefill: a `FusedDecoder` or `FusedPrefill`."""

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        """Queue one run."""
        ...


class Head(NamedTuple):
    """An LM head that is an input: name and shape."""

    name: str
    shape: tuple[int, ...]


class FusedBackend:
    """Runs of one part in the fused kernels; bindings: as of the part's graph."""

    supports_empty_tensors = True

    def __init__(self, decoder: Decoder, bindings: Iterable[Binding], device: Device) -> None:
        self._decoder, self._device = decoder, device
        self.bindings = tuple(bindings)

    def bind(self, profile: int, tensors: Mapping[str, Tensor], stream: Any) -> dict[str, Tensor]:
        return dict(tensors)

    def run(self, bound: dict[str, Tensor], stream: Any) -> None:
        self._decoder.run(bound)

    def capture(self, bound: dict[str, Tensor], stream: Any) -> DeviceGraph | None:
        self.run(bound, stream)
        return self._device.capture(lambda: self.run(bound, stream))


def step_bindings(
    shape: FusedShape,
    head: Head | None,
    trees: bool = False,
    fused_size: int = 0,
    recurrent: RecurrentConfig | None = None,
    adapted: bool = False,
    verifies: bool = False,
) -> Iterator[Binding]:
    """Yield the tensors of decode steps and verifications.

    - head: the LM head if it is an input; None if the decoder's weights have it
    - trees: whether several tokens of a sequence are a tree, which has a mask; False: a chain
    - fused_size: size of the fused states, an output for a draft head; 0 = there is none
    - recurrent: of the model's recurrent layers; None = it has none
    - adapted: whether the sequences have LoRA adapters, whose table is an input
    - verifies: whether recurrent layers output the values of chains
    """
    yield from token_bindings(shape, trees)
    yield from _output_bindings(shape, head, "S", fused_size)
    if recurrent is not None:
        yield from _recurrent_bindings(recurrent, verifies)
    if adapted:
        yield Binding(names.LORA_TABLE, np.dtype(np.int64), (shape.layers, 4, "B", 3), True)


def prefill_bindings(
    shape: FusedShape,
    head: Head | None,
    deepstack: int = 0,
    fused_size: int = 0,
    recurrent: RecurrentConfig | None = None,
) -> Iterator[Binding]:
    """Yield the tensors of prefills.

    deepstack: number of layers after which image features are added; the others as of `step_bindings`.
    """
    yield from token_bindings(shape, trees=False)
    yield from _output_bindings(shape, head, "N", fused_size)
    yield Binding(names.LAST_TOKEN_IDS, np.dtype(np.int64), ("B", "N"), True)
    for i in range(deepstack):
        yield Binding(names.deepstack_embeds(i), element_type(shape.dtype), ("B", "S", shape.hidden), True)
    if recurrent is not None:
        yield from _recurrent_bindings(recurrent, verifies=False)


def _output_bindings(
    shape: FusedShape, head: Head | None, logit_rows: str, fused_size: int
) -> Iterator[Binding]:
    dtype = element_type(shape.dtype)
    if head is not None:
        yield Binding(head.name, dtype, head.shape, True)
    yield Binding(names.LOGITS, np.dtype(np.float32), ("B", logit_rows, shape.vocab), False)
    for layer in shape.hidden_state_layers:
        yield Binding(names.hidden_states(layer), dtype, ("B", "S", shape.hidden), False)
    if fused_size:
        yield Binding(names.FUSED_HIDDEN_STATES, dtype, ("B", "S", fused_size), False)


def _recurrent_bindings(recurrent: RecurrentConfig, verifies: bool) -> Iterator[Binding]:
    float32 = np.dtype(np.float32)
    conv, state = ("B", *recurrent.conv_shape), ("B", *recurrent.state_shape)
    # The tokens of a step are all valid, so only the kernels of prompts read their number.
    yield Binding(names.VALID_TOKENS, np.dtype(np.int64), ("B",), True)
    for i in range(recurrent.num_layers):
        yield Binding(names.conv_state(i), float32, conv, True)
        yield Binding(names.recurrent_state(i), float32, state, True)
        yield Binding(names.present_conv_state(i), float32, conv, False)
        yield Binding(names.present_recurrent_state(i), float32, state, False)
        for kind, width in recurrent.chain_widths.items() if verifies else ():
            yield Binding(names.chain_value(kind, i), float32, ("B", "T", width), False)


def token_bindings(shape: FusedShape, trees: bool) -> Iterator[Binding]:
    """Yield the inputs of a run over tokens: embeddings, positions and KV caches.

    trees: with a mask.
    """
    dtype, half = element_type(shape.dtype), shape.rotary_dim // 2
    int64, float32 = np.dtype(np.int64), np.dtype(np.float32)
    yield Binding(names.INPUTS_EMBEDS, dtype, ("B", "S", shape.hidden), True)
    if half:
        yield Binding(names.ROPE_COS, float32, ("P", half), True)
        yield Binding(names.ROPE_SIN, float32, ("P", half), True)
        yield Binding(names.POSITION_IDS, int64, ("B", "S"), True)
    yield Binding(names.KV_LENGTH, int64, ("B",), True)
    if trees:
        yield Binding(names.ATTENTION_MASK, np.dtype(np.bool_), ("B", 1, "S", shape.capacity), True)
    cached = float8() if shape.fp8_cache else dtype
    for i in range(shape.caches):
        slots = ("B", shape.kv_heads, shape.capacity, shape.head_dim)
        yield Binding(names.key_cache(i), cached, slots, True)
        yield Binding(names.value_cache(i), cached, slots, True)


def element_type(precision: str) -> np.dtype:
    """Return the type of "fp16" or "bf16"."""
    return np.dtype(np.float16) if precision == "fp16" else bfloat16()
