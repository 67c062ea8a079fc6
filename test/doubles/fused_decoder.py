# SPDX-License-Identifier: Apache-2.0
"""The fused kernels in NumPy: a decode step in float64, for tests.

`decode_step` computes on arrays. `HostFusedDecoder` has the
interface of `FusedDecoder` and computes on host memory by address, so that the whole runtime can run on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from doubles.deferred_device import DeferredDevice
from doubles.fused_recurrent import FLOAT_WEIGHTS, Mixed, mix, mixer_shapes
from doubles.quantized_weights import QuantizedMatrix
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.fusion import StateFusion
from edgellm_ros.fused.plan.fusion import FusionShape
from edgellm_ros.fused.plan.quantized import ALIGNMENT, Quantized
from edgellm_ros.fused.plan.shape import SQUARED_RELU, FusedShape
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights

JOINED = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}  # linear layers of a product
ROPE = {"cos": "rope_cos", "sin": "rope_sin", "position_ids": "position_ids"}  # of models with RoPE
TYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class LayerArrays:
    """Weights of one layer; FusedLayerWeights documents the shapes.

    None = the model has none.
    """

    input_norm: np.ndarray | None = None
    qkv: np.ndarray | None = None
    o: np.ndarray | None = None
    post_norm: np.ndarray | None = None
    gate_up: np.ndarray | None = None
    down: np.ndarray | None = None
    qkv_bias: np.ndarray | None = None
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    o_bias: np.ndarray | None = None
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    state_norm: np.ndarray | None = None  # of a draft head's first layer
    in_proj: np.ndarray | None = None  # of a recurrent mixer, as all that follows
    out_proj: np.ndarray | None = None
    taps: np.ndarray | None = None
    conv_bias: np.ndarray | None = None
    decay: np.ndarray | None = None
    dt_bias: np.ndarray | None = None
    skip: np.ndarray | None = None
    mixer_norm: np.ndarray | None = None
    # by product ("qkv", "o", "gate_up", "down") and sequence: A [K,n r] and B [n r,N], None = no adapter
    lora: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray] | None]] = field(default_factory=dict)


ATTENTION, MIXER, FEED_FORWARD = "qkv", "in_proj", "gate_up"  # the first matrix of each kind of block
DENSE = (ATTENTION, FEED_FORWARD)


def layer_shapes(shape: FusedShape, blocks: Sequence[str] = DENSE) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a layer of these blocks has."""
    hidden, inner, qkv = shape.hidden, shape.inner, shape.qkv_size
    shapes: dict[str, tuple[int, ...]] = {}
    if FEED_FORWARD in blocks:
        gate_up = shape.gate_up_size
        shapes |= {"post_norm": (hidden,), "gate_up": (hidden, gate_up), "down": (inner, hidden)}
        if shape.mlp_bias:
            shapes |= {"gate_up_bias": (gate_up,), "down_bias": (hidden,)}
    if MIXER in blocks:
        shapes |= {"input_norm": (hidden,), **mixer_shapes(shape)}
    if ATTENTION in blocks:
        shapes |= {"input_norm": (hidden,), "qkv": (hidden, qkv), "o": (shape.q_size, hidden)}
        if shape.qkv_bias:
            shapes["qkv_bias"] = (qkv,)
        if shape.qk_norm:
            shapes["q_norm"] = shapes["k_norm"] = (shape.head_dim,)
        if shape.o_bias:
            shapes["o_bias"] = (hidden,)
    return shapes


@dataclass
class Step:
    """Inputs of a step as arrays; the caches are updated in place."""

    embeds: np.ndarray  # [B,S,H]
    cos: np.ndarray | None  # [P,R/2], as sin and the position_ids [B,S]; None without RoPE
    sin: np.ndarray | None
    position_ids: np.ndarray | None
    kv_length: np.ndarray  # [B], with the new tokens
    caches: list[tuple[np.ndarray, np.ndarray]]  # of each layer with attention [B,Hkv,C,D]
    mask: np.ndarray | None = None  # [B,S,C] of trees; None: the tokens of a sequence are a chain
    # Of each recurrent layer: the convolution's [B,C,K-1], and the heads' [B,groups,dk,columns].
    recurrent_states: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    deepstack: list[np.ndarray] = field(default_factory=list)  # added after the first layers, [B,S,H] each
    valid_tokens: np.ndarray | None = None  # [B]: those that change recurrent states; None: all


@dataclass
class StepResult:
    """Outputs of a step in float64."""

    logits: np.ndarray  # [B,S,V]
    hidden_states: dict[int, np.ndarray] = field(default_factory=dict)  # by layer from 1: [B,S,H]
    stream: list[np.ndarray] = field(default_factory=list)  # before each layer and after the last: [B,S,H]
    mixed: list[Mixed] = field(default_factory=list)  # of each recurrent layer
    normed: np.ndarray = field(default_factory=lambda: np.empty(0))  # after the last norm: [B,S,H]


def decode_step(
    shape: FusedShape, layers: list[LayerArrays], norm: np.ndarray, lm_head: np.ndarray, step: Step
) -> StepResult:
    """Compute S tokens of each sequence.

    lm_head: [V,H] if the shape is tied, else [H,columns], of which the first V count.
    """
    x, result = step.embeds.astype(np.float64), StepResult(np.empty(0))
    caches, states = iter(step.caches), iter(step.recurrent_states)
    for i, layer in enumerate(layers):
        result.stream.append(x)
        if layer.qkv is not None:
            qkv = _product(layer, "qkv", rms_norm(x, layer.input_norm, shape.epsilon))
            x = x + _product(layer, "o", attention(shape, layer, shape.window(i), qkv, next(caches), step))
        if layer.in_proj is not None:
            projected = _product(layer, "in_proj", rms_norm(x, layer.input_norm, shape.epsilon))
            result.mixed.append(mix(shape, layer, projected, next(states), step.valid_tokens))
            x = x + _product(layer, "out_proj", result.mixed[-1].values)
        if layer.gate_up is not None:
            x = x + _feed_forward(shape, layer, rms_norm(x, layer.post_norm, shape.epsilon))
        if i + 1 in shape.hidden_state_layers:
            result.hidden_states[i + 1] = x
        if i < len(step.deepstack):
            x = x + step.deepstack[i].astype(np.float64)
    result.stream.append(x)
    result.normed = x = rms_norm(x, norm, shape.epsilon)
    if shape.layers in shape.hidden_state_layers:
        result.hidden_states[shape.layers] = x
    result.logits = _linear(x, lm_head.T if shape.tied else lm_head[:, : shape.vocab], None)
    return result


def _feed_forward(shape: FusedShape, layer: LayerArrays, normed: np.ndarray) -> np.ndarray:
    values = _product(layer, "gate_up", normed)
    if shape.activation == SQUARED_RELU:
        return _product(layer, "down", np.maximum(values, 0) ** 2)
    gate, up = np.split(values, 2, axis=-1)
    return _product(layer, "down", gate / (1 + np.exp(-gate)) * up)


def attention(
    shape: FusedShape,
    layer: LayerArrays,
    window: int | None,
    qkv: np.ndarray,
    caches: tuple[np.ndarray, np.ndarray],
    step: Step,
) -> np.ndarray:
    """Write the new keys and values to the caches and attend.

    qkv is [B,S,(Hq+2Hkv)*D], with a gate beside each query 2Hq of these; the result is [B,S,Hq*D].
    """
    batch, tokens, size = *qkv.shape[:2], shape.head_dim
    queries = shape.qkv_size - 2 * shape.kv_size
    q, k, v = (
        part.reshape(batch, tokens, -1, size)
        for part in np.split(qkv, [queries, queries + shape.kv_size], axis=-1)
    )
    gates = None
    if shape.attention_gate:
        q, gates = q[:, :, ::2], q[:, :, 1::2]
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, shape.epsilon), rms_norm(k, layer.k_norm, shape.epsilon)
    q, k = (rotate(shape, heads, step) for heads in (q, k))
    out = np.empty((batch, tokens, shape.heads, size))
    keys, values = caches
    for b in range(batch):
        first_new = int(step.kv_length[b]) - tokens
        new = slice(first_new, first_new + tokens)
        keys[b, :, new], values[b, :, new] = (cached(rows[b].swapaxes(0, 1), keys.dtype) for rows in (k, v))
        for token in range(tokens):
            rows = seen_rows(step, b, token, window)
            for head in range(shape.heads):
                kv_head = head // (shape.heads // shape.kv_heads)
                scores = keys[b, kv_head, rows].astype(np.float64) @ q[b, token, head] * size**-0.5
                weights = np.exp(scores - scores.max())
                out[b, token, head] = weights / weights.sum() @ values[b, kv_head, rows].astype(np.float64)
    if gates is not None:
        out = out / (1 + np.exp(-gates))
    return out.reshape(batch, tokens, -1)


def cached(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round rows to the type of a cache.

    In FP8, values beyond the range become its largest ones.
    """
    return (np.clip(rows, -448, 448) if dtype.itemsize == 1 else rows).astype(dtype)


def seen_rows(step: Step, sequence: int, token: int, window: int | None) -> np.ndarray:
    """Return the rows of the cache that a new token attends to."""
    tokens, length = step.embeds.shape[1], int(step.kv_length[sequence])
    rows = np.arange(length - tokens + token + 1)
    if step.mask is not None:
        rows = np.flatnonzero(step.mask[sequence, token, :length])
    end = length - tokens + np.count_nonzero(rows >= length - tokens)  # the token's position, and 1
    return rows if window is None else rows[rows >= end - window]


def rotate(shape: FusedShape, heads: np.ndarray, step: Step) -> np.ndarray:
    """Rotate the first values of heads [...,n,D] by each token's position."""
    if not shape.rotary_dim:
        return heads
    half = shape.rotary_dim // 2
    cos, sin = (table[step.position_ids].astype(np.float64)[..., None, :] for table in (step.cos, step.sin))
    places = np.arange(shape.rotary_dim).reshape(half, 2).T if shape.rope_interleaved else None
    first, second = places if places is not None else (np.arange(half), half + np.arange(half))
    out = heads.copy()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return out


def rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    """Norm the last axis in float64."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale.astype(np.float64)


def _product(layer: LayerArrays, name: str, x: np.ndarray) -> np.ndarray:
    """Multiply x [B,S,K] with a matrix of a layer, and with each sequence's adapter."""
    y = _linear(x, getattr(layer, name), getattr(layer, f"{name}_bias", None))
    for sequence, adapter in enumerate(layer.lora.get(name, ())):
        if adapter is not None:
            a, b = (matrix.astype(np.float64) for matrix in adapter)
            y[sequence] += x[sequence] @ a @ b
    return y


def _linear(x: np.ndarray, matrix: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    y = x @ matrix.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


def fuse(
    shape: FusionShape,
    states: Sequence[np.ndarray],
    fc: np.ndarray,
    bias: np.ndarray | None,
    norms: Sequence[np.ndarray],
) -> np.ndarray:
    """Compute the fused states of three states [...,Hb].

    norms: three, or one of all states.
    """
    values = [state.astype(np.float64) for state in states]
    if shape.state_norms:
        values = [rms_norm(value, norm, shape.epsilon) for value, norm in zip(values, norms, strict=True)]
    joined = np.concatenate(values, axis=-1)
    if shape.joined_norm:
        joined = rms_norm(joined, norms[0], shape.epsilon)
    fused = _linear(joined, fc, bias)
    return fused.clip(-65504, 65504) if shape.dtype == "fp16" else fused


class HostFusedDecoder:
    """FusedDecoder on host memory; on a DeferredDevice a step is queued like a kernel."""

    def __init__(
        self, device: Any, shape: FusedShape, weights: FusedWeights, fusion: StateFusion | None = None
    ) -> None:
        self.max_rows = shape.max_rows
        self.steps = 0
        self.sizes: list[tuple[int, int]] = []  # of each step: sequences, tokens of each
        self._device, self._shape = device, shape
        self._weights, dtype = weights, TYPES[shape.dtype]  # keeps the memory alive
        kinds = [dict(kind.quantized) for kind in shape.of_each_kind()]
        self._layers = [_layer(layer, shape, kinds[shape.kind(i)]) for i, layer in enumerate(weights.layers)]
        self.max_adapted_rows = shape.max_rows if shape.lora_rank else 0
        self._norm = array_at(weights.norm, (shape.hidden,), dtype)
        size = (shape.vocab, shape.hidden) if shape.tied else (shape.hidden, shape.all_head_columns)
        self._lm_head = _matrix(weights.lm_head, size, shape.head, dtype) if weights.lm_head else None
        self._fusion = fusion
        if fusion is not None:
            self._fusion_arrays = _fusion_arrays(fusion)

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        self.steps += 1
        self.sizes.append(tensors["inputs_embeds"].shape[:2])
        self.queue(lambda: self._run(tensors))

    def queue(self, work: Callable[[], None]) -> None:
        """Do work now, or on a DeferredDevice when its turn comes."""
        if isinstance(self._device, DeferredDevice):
            self._device.queue(work)
        else:
            work()

    def _run(self, tensors: Mapping[str, Tensor]) -> None:
        arrays = arrays_of(tensors)
        batch, tokens, _ = arrays["inputs_embeds"].shape
        assert batch * tokens <= self._shape.max_rows
        arrays["logits"][...] = self.compute(arrays).logits

    def compute(self, arrays: Mapping[str, np.ndarray]) -> StepResult:
        """Compute a run; write all outputs but the logits."""
        step = Step(**token_inputs(arrays, self._shape))
        head = self._lm_head
        if head is None:
            head = arrays["embedding" if self._shape.tied else "lm_head.weight"]
        layers = self._layers
        if "lora_table" in arrays:
            layers = [
                replace(layer, lora=_adapters(layer, table))
                for layer, table in zip(layers, arrays["lora_table"], strict=True)
            ]
        result = decode_step(self._shape, layers, self._norm, head, step)
        for i, mixed in enumerate(result.mixed):
            conv_state, state = mixed.states
            arrays[f"present_conv_state_{i}"][...] = conv_state
            arrays[f"present_recurrent_state_{i}"][...] = state
            for kind, values in mixed.chain.items() if step.embeds.shape[1] > 1 else ():
                if f"chain_{kind}_{i}" in arrays:
                    arrays[f"chain_{kind}_{i}"][...] = values
        for layer, states in result.hidden_states.items():
            arrays[f"hidden_states_{layer}"][...] = states
        if self._shape.last_states:
            arrays["fused_hidden_states"][...] = result.normed
        if self._fusion is not None:
            states = [result.stream[layer] for layer in self._fusion.layers]
            fused = fuse(self._fusion.shape, states, *self._fusion_arrays)
            arrays["fused_hidden_states"][...] = fused
        return result


class HostFusedPrefill:
    """FusedPrefill on host memory, with the weights of a decoder."""

    def __init__(self, decoder: HostFusedDecoder) -> None:
        self._decoder = decoder

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        self._decoder.queue(lambda: self._run(tensors))

    def _run(self, tensors: Mapping[str, Tensor]) -> None:
        arrays = arrays_of(tensors)
        result = self._decoder.compute(arrays)
        arrays["logits"][...] = np.take_along_axis(result.logits, arrays["last_token_ids"][..., None], 1)


class HostFusedVerification(HostFusedPrefill):
    """FusedVerification on host memory; its runs are among the `sizes` of the decoder."""

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        self._decoder.sizes.append(tensors["inputs_embeds"].shape[:2])
        super().run(tensors)

    def _run(self, tensors: Mapping[str, Tensor]) -> None:
        arrays = arrays_of(tensors)
        arrays["logits"][...] = self._decoder.compute(arrays).logits


def _adapters(layer: LayerArrays, table: np.ndarray) -> dict[str, list[tuple[np.ndarray, np.ndarray] | None]]:
    """Read the adapters of a layer; table: [4 products, sequences, 3]."""
    adapters: dict[str, list[tuple[np.ndarray, np.ndarray] | None]] = {}
    for (name, joined), sequences in zip(JOINED.items(), table.tolist(), strict=True):
        k, n = getattr(layer, name).shape
        adapters[name] = [
            (array_at(a, (k, joined * rank), layer.o.dtype), array_at(b, (joined * rank, n), layer.o.dtype))
            if rank else None
            for a, b, rank in sequences
        ]  # fmt: skip
    return adapters


def _layer(layer: FusedLayerWeights, shape: FusedShape, forms: Mapping[str, Quantized]) -> LayerArrays:
    given = {name for name, address in vars(layer).items() if address}
    shapes, dtype = layer_shapes(shape, sorted(given)), TYPES[shape.dtype]
    assert given == set(shapes), f"weights {sorted(given)}, expected {sorted(shapes)}"
    arrays = {}
    for name, size in shapes.items():
        of_type = np.dtype(np.float32) if name in FLOAT_WEIGHTS else dtype
        arrays[name] = _matrix(getattr(layer, name), size, forms.get(name), of_type)
    return LayerArrays(**arrays)


def _matrix(pointer: int, size: tuple[int, ...], form: Quantized | None, dtype: np.dtype) -> np.ndarray:
    """Read a weight, in float64 if it is quantised."""
    if form is None:
        return array_at(pointer, size, dtype)
    nbytes = sum(-(-part // ALIGNMENT) * ALIGNMENT for part in form.parts(*size))
    contents = array_at(pointer, (nbytes,), np.dtype(np.uint8))
    return QuantizedMatrix.read(contents, form, size, dtype).dequantized()


def _fusion_arrays(fusion: StateFusion) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
    """Return the weights of a fusion: fc, its bias, norms."""
    shape, weights, dtype = fusion.shape, fusion.weights, TYPES[fusion.shape.dtype]
    size, norms = shape.state_size, []
    if shape.state_norms:
        norms = [array_at(pointer, (size,), dtype) for pointer in weights.norms]
    if shape.joined_norm:
        norms = [array_at(weights.norms[0], (3 * size,), dtype)]
    bias = array_at(weights.bias, (shape.fused_size,), dtype) if weights.bias else None
    return array_at(weights.fc, (3 * size, shape.fused_size), dtype), bias, norms


def arrays_of(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """View the tensors of a run as arrays."""
    return {name: array_at(each.pointer, each.shape, each.dtype) for name, each in tensors.items()}


def token_inputs(arrays: Mapping[str, np.ndarray], shape: FusedShape) -> dict[str, Any]:
    """Return the fields of a `Step` that the arrays of a run have."""
    mask = arrays.get("attention_mask") if arrays["inputs_embeds"].shape[1] > 1 else None
    return {
        "embeds": arrays["inputs_embeds"],
        **{name: arrays.get(tensor) for name, tensor in ROPE.items()},
        "kv_length": arrays["kv_length"],
        "caches": [(arrays[f"key_cache_{i}"], arrays[f"value_cache_{i}"]) for i in range(shape.caches)],
        "recurrent_states": [
            (arrays[f"conv_state_{i}"], arrays[f"recurrent_state_{i}"])
            for i in range(sum(name.startswith("conv_state_") for name in arrays))
        ],
        "mask": None if mask is None else mask[:, 0],
        "valid_tokens": arrays.get("valid_tokens") if "last_token_ids" in arrays else None,
        "deepstack": [
            arrays[f"deepstack_embeds_{i}"]
            for i in range(sum(name.startswith("deepstack_embeds_") for name in arrays))
        ],
    }


def array_at(pointer: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """View host memory as an array; the caller keeps the memory alive."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * max(1, nbytes)).from_address(pointer)
    return np.frombuffer(raw, np.uint8)[:nbytes].view(dtype).reshape(shape)
