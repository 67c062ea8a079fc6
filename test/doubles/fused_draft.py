# SPDX-License-Identifier: Apache-2.0
"""Runs of a draft head, and its fusion of base states, in NumPy: the reference of the fused kernels' tests.

`run_head` and `fuse` compute on arrays in float64. `HostFusedDraft` has the interface of `FusedDraft` and
computes on host memory by address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from doubles.deferred_device import DeferredDevice
from doubles.fused_decoder import TYPES, LayerArrays, Step, array_at, layer_shapes, rms_norm, rotate
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.cuda.fused.draft import FusedDraftShape
from edgellm_ros.kernels.cuda.fused.fusion import FusionShape
from edgellm_ros.kernels.cuda.fused.weights import FusedLayerWeights, FusedWeights


@dataclass
class HeadRun:
    """Inputs of a run as arrays; the caches are updated in place."""

    embeds: np.ndarray  # [B,S,H]
    states: np.ndarray  # [B,S,H]
    cos: np.ndarray  # [P,R/2]
    sin: np.ndarray
    position_ids: np.ndarray  # [B,S]
    kv_length: np.ndarray  # [B], with the new tokens
    last_token_ids: np.ndarray  # [B,N]
    caches: list[tuple[np.ndarray, np.ndarray]]  # of each layer [B,Hkv,C,D]
    mask: np.ndarray | None = None  # [B,1,S,C] bool; None = a chain


def head_layer_shapes(shape: FusedDraftShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a head's layer."""
    shapes = layer_shapes(shape)
    if layer == 0:
        shapes |= {"qkv": (2 * shape.hidden, shape.qkv_size), "state_norm": (shape.hidden,)}
    return shapes


def run_head(
    shape: FusedDraftShape, layers: list[LayerArrays], norm: np.ndarray, lm_head: np.ndarray, run: HeadRun
) -> tuple[np.ndarray, np.ndarray]:
    """Compute logits [B,N,V] and next states [B,S,H]."""
    x, embeds = run.states.astype(np.float64), run.embeds.astype(np.float64)
    for i, (layer, caches) in enumerate(zip(layers, run.caches, strict=True)):
        if i == 0:
            normed = rms_norm(x, layer.state_norm, shape.epsilon)
            x = normed if shape.norm_before_residual else x
            normed = np.concatenate([rms_norm(embeds, layer.input_norm, shape.epsilon), normed], axis=-1)
        else:
            normed = rms_norm(x, layer.input_norm, shape.epsilon)
        attended = _attention(shape, layer, _linear(normed, layer.qkv, layer.qkv_bias), caches, run)
        x = x + _linear(attended, layer.o, layer.o_bias)
        normed = rms_norm(x, layer.post_norm, shape.epsilon)
        gate, up = np.split(_linear(normed, layer.gate_up, layer.gate_up_bias), 2, axis=-1)
        x = x + _linear(gate / (1 + np.exp(-gate)) * up, layer.down, layer.down_bias)
    normed = rms_norm(x, norm, shape.epsilon)
    chosen = np.take_along_axis(normed, run.last_token_ids[..., None], axis=1)
    return _linear(chosen, lm_head, None), normed if shape.feeds_back_normed_state else x


def fuse(
    shape: FusionShape,
    states: Sequence[np.ndarray],
    fc: np.ndarray,
    bias: np.ndarray | None,
    norms: Sequence[np.ndarray],
) -> np.ndarray:
    """Compute the fused states of three states [rows,Hb]; norms: three, or one of all states."""
    values = [state.astype(np.float64) for state in states]
    if shape.state_norms:
        values = [
            rms_norm(value, norm, shape.epsilon) for value, norm in zip(values, norms, strict=True)
        ]
    joined = np.concatenate(values, axis=-1)
    if shape.joined_norm:
        joined = rms_norm(joined, norms[0], shape.epsilon)
    fused = _linear(joined, fc, bias)
    return fused.clip(-65504, 65504) if shape.dtype == "fp16" else fused


def _attention(
    shape: FusedDraftShape,
    layer: LayerArrays,
    qkv: np.ndarray,
    caches: tuple[np.ndarray, np.ndarray],
    run: HeadRun,
) -> np.ndarray:
    """Write the new keys and values to the caches and attend to them: [B,S,(Hq+2Hkv)*D] -> [B,S,Hq*D]."""
    batch, tokens, _ = qkv.shape
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    q, k, v = (
        part.reshape(batch * tokens, -1, size)
        for part in np.split(qkv, [shape.q_size, shape.q_size + shape.kv_size], axis=-1)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, shape.epsilon), rms_norm(k, layer.k_norm, shape.epsilon)
    step = Step(q, run.cos, run.sin, run.position_ids.reshape(-1), run.kv_length, [])
    q, k = (rotate(shape, heads, step) for heads in (q, k))
    q, k, v = (heads.reshape(batch, tokens, -1, size) for heads in (q, k, v))
    keys, values = caches
    out = np.empty((batch, tokens, shape.heads, size))
    for row in range(batch):
        first = int(run.kv_length[row]) - tokens
        new = slice(first, first + tokens)
        keys[row, :, new], values[row, :, new] = k[row].swapaxes(0, 1), v[row].swapaxes(0, 1)
        for token in range(tokens):
            seen = np.arange(first + token + 1)
            if run.mask is not None:
                seen = np.flatnonzero(run.mask[row, 0, token, : first + tokens])
            for head in range(shape.heads):
                scores = keys[row, head // group, seen].astype(np.float64) @ q[row, token, head]
                weights = np.exp((scores - scores.max()) * size**-0.5)
                weighted = weights / weights.sum()
                out[row, token, head] = weighted @ values[row, head // group, seen].astype(np.float64)
    return out.reshape(batch, tokens, -1)


def _linear(x: np.ndarray, matrix: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    y = x @ matrix.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


class HostFusedDraft:
    """FusedDraft on host memory; on a DeferredDevice a run is queued like a kernel."""

    def __init__(self, device: Any, shape: FusedDraftShape, weights: FusedWeights) -> None:
        self.runs: list[tuple[int, int]] = []  # sequences and tokens of each
        self._device, self._shape = device, shape
        self._weights, dtype = weights, TYPES[shape.dtype]  # keeps the memory alive
        self._layers = [
            _layer(layer, head_layer_shapes(shape, i), dtype) for i, layer in enumerate(weights.layers)
        ]
        self._norm = array_at(weights.norm, (shape.hidden,), dtype)
        self._lm_head = array_at(weights.lm_head, (shape.hidden, shape.vocab), dtype)

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        self.runs.append(tensors["inputs_embeds"].shape[:2])
        if isinstance(self._device, DeferredDevice):
            self._device.queue(lambda: self._run(tensors))
        else:
            self._run(tensors)

    def _run(self, tensors: Mapping[str, Tensor]) -> None:
        arrays = {name: array_at(each.pointer, each.shape, each.dtype) for name, each in tensors.items()}
        batch, tokens, _ = arrays["inputs_embeds"].shape
        assert batch * tokens <= self._shape.max_rows
        run = HeadRun(
            arrays["inputs_embeds"],
            arrays["hidden_states"],
            arrays["rope_cos"],
            arrays["rope_sin"],
            arrays["position_ids"],
            arrays["kv_length"],
            arrays["last_token_ids"],
            [(arrays[f"key_cache_{i}"], arrays[f"value_cache_{i}"]) for i in range(self._shape.layers)],
            arrays.get("attention_mask"),
        )
        logits, states = run_head(self._shape, self._layers, self._norm, self._lm_head, run)
        arrays["logits"][...], arrays["next_hidden_states"][...] = logits, states


def _layer(layer: FusedLayerWeights, shapes: dict[str, tuple[int, ...]], dtype: np.dtype) -> LayerArrays:
    given = {field.name for field in dataclasses.fields(layer) if getattr(layer, field.name)}
    assert given == set(shapes), f"weights {sorted(given)}, expected {sorted(shapes)}"
    return LayerArrays(**{name: array_at(getattr(layer, name), shapes[name], dtype) for name in shapes})
