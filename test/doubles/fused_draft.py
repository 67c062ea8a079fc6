# SPDX-License-Identifier: Apache-2.0
"""Runs of a draft head in NumPy: the reference of the fused kernels' tests.

`run_head` computes on arrays in float64. `HostFusedDraft` and `HostFusedChain` have the interfaces of
`FusedDraft` and `FusedChain`, and compute on host memory by address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from doubles.deferred_device import DeferredDevice
from doubles.fused_decoder import (
    TYPES,
    LayerArrays,
    Step,
    array_at,
    arrays_of,
    attention,
    layer_shapes,
    rms_norm,
    token_inputs,
)
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.draft import Projection
from edgellm_ros.fused.plan.shape import FusedDraftShape
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights
from edgellm_ros.kernels.chain_protocol import ChainDraft


@dataclass(frozen=True)
class ProjectionArrays:
    """Weights that make one row of an embedding and a state, for an MTP head."""

    embedding_norm: np.ndarray  # [H]
    state_norm: np.ndarray  # [H]
    fc: np.ndarray  # [2H,H]
    state_first: bool = False


@dataclass(kw_only=True)
class HeadRun(Step):
    """Inputs of a run as arrays; the caches are updated in place."""

    states: np.ndarray  # [B,S,H]
    last_token_ids: np.ndarray  # [B,N]


def head_layer_shapes(shape: FusedDraftShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a head's layer."""
    shapes = layer_shapes(shape)
    if layer == 0 and shape.joined:
        shapes |= {"qkv": (2 * shape.hidden, shape.qkv_size), "state_norm": (shape.hidden,)}
    return shapes


def run_head(
    shape: FusedDraftShape,
    layers: list[LayerArrays],
    norm: np.ndarray,
    lm_head: np.ndarray,
    run: HeadRun,
    projection: ProjectionArrays | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute logits [B,N,V] and next states [B,S,H]."""
    x, embeds = run.states.astype(np.float64), run.embeds.astype(np.float64)
    if projection is not None:
        pair = [rms_norm(embeds, projection.embedding_norm, shape.epsilon)]
        pair.append(rms_norm(x, projection.state_norm, shape.epsilon))
        joined = np.concatenate(pair[:: -1 if projection.state_first else 1], axis=-1)
        x = _linear(joined, projection.fc, None)
    for i, (layer, caches) in enumerate(zip(layers, run.caches, strict=True)):
        if i == 0 and projection is None:
            normed = rms_norm(x, layer.state_norm, shape.epsilon)
            x = normed if shape.norm_before_residual else x
            normed = np.concatenate([rms_norm(embeds, layer.input_norm, shape.epsilon), normed], axis=-1)
        else:
            normed = rms_norm(x, layer.input_norm, shape.epsilon)
        qkv = _linear(normed, layer.qkv, layer.qkv_bias)
        attended = attention(shape, layer, shape.window(i), qkv, caches, run)
        x = x + _linear(attended, layer.o, layer.o_bias)
        normed = rms_norm(x, layer.post_norm, shape.epsilon)
        gate, up = np.split(_linear(normed, layer.gate_up, layer.gate_up_bias), 2, axis=-1)
        x = x + _linear(gate / (1 + np.exp(-gate)) * up, layer.down, layer.down_bias)
    normed = rms_norm(x, norm, shape.epsilon)
    chosen = np.take_along_axis(normed, run.last_token_ids[..., None], axis=1)
    return _linear(chosen, lm_head, None), normed if shape.feeds_back_normed_state else x


def _linear(x: np.ndarray, matrix: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    y = x @ matrix.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


class HostFusedDraft:
    """FusedDraft on host memory; on a DeferredDevice a run is queued like a kernel."""

    def __init__(
        self, device: Any, shape: FusedDraftShape, weights: FusedWeights, projection: Projection | None = None
    ) -> None:
        self.runs: list[tuple[int, int]] = []  # sequences and tokens of each
        self.max_rows = shape.max_rows
        self._device, self._shape = device, shape
        self._weights, dtype = weights, TYPES[shape.dtype]  # keeps the memory alive
        self._layers = [
            _layer(layer, head_layer_shapes(shape, i), dtype) for i, layer in enumerate(weights.layers)
        ]
        self._norm = array_at(weights.norm, (shape.hidden,), dtype)
        columns = shape.all_head_columns
        self._lm_head = array_at(weights.lm_head, (shape.hidden, columns), dtype)[:, : shape.vocab]
        self._projection = None
        if projection is not None:
            size, (first, second, _) = shape.hidden, projection.weights.norms
            norms = [array_at(each, (size,), dtype) for each in (first, second)]
            fc = array_at(projection.weights.fc, (2 * size, size), dtype)
            norms = norms[::-1] if projection.state_first else norms
            self._projection = ProjectionArrays(*norms, fc, projection.state_first)

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        self.runs.append(tensors["inputs_embeds"].shape[:2])
        if isinstance(self._device, DeferredDevice):
            self._device.queue(lambda: self._run(tensors))
        else:
            self._run(tensors)

    def _run(self, tensors: Mapping[str, Tensor]) -> None:
        arrays = arrays_of(tensors)
        run = HeadRun(
            **token_inputs(arrays, self._shape),
            states=arrays["hidden_states"],
            last_token_ids=arrays["last_token_ids"],
        )
        weights = self._layers, self._norm, self._lm_head
        logits, states = run_head(self._shape, *weights, run, self._projection)
        arrays["logits"][...], arrays["next_hidden_states"][...] = logits, states


class HostFusedChain:
    """FusedChain on host memory; on a DeferredDevice a draft is queued like a kernel."""

    max_batch = 2

    def __init__(
        self, device: Any, shape: FusedDraftShape, weights: FusedWeights, rows: int, levels: int
    ) -> None:
        self.drafts: list[int] = []  # sequences of each
        self._device, self._shape, self._rows, self._levels = device, shape, rows, levels
        self._weights, self._dtype = weights, TYPES[shape.dtype]  # keeps the memory alive
        self._layers = [_layer(weights.layers[0], head_layer_shapes(shape, 0), self._dtype)]
        self._norm = array_at(weights.norm, (shape.hidden,), self._dtype)
        self._lm_head = array_at(weights.lm_head, (shape.hidden, shape.vocab), self._dtype)

    def run(self, draft: ChainDraft) -> None:
        assert (draft.tokens.shape[1], draft.table.levels) == (self._rows, self._levels)
        self.drafts.append(draft.tokens.shape[0])
        if isinstance(self._device, DeferredDevice):
            self._device.queue(lambda: self._run(draft))
        else:
            self._run(draft)

    def _run(self, draft: ChainDraft) -> None:
        def tensors(owner: Any) -> dict[str, np.ndarray]:
            named = {name: each for name, each in vars(owner).items() if isinstance(each, Tensor)}
            return arrays_of(named)

        arrays, table, tree = tensors(draft), tensors(draft.table), tensors(draft.tree)
        rope, caches = tensors(draft.rope), arrays_of(draft.caches)
        embedding = arrays["embedding"].view(self._dtype)
        ids = arrays.get("token_of_logit", np.arange(self._shape.vocab))
        for row in range(len(arrays["tokens"])):
            count, length = int(arrays["counts"][row]), int(arrays["lengths"][row])
            if count < 1:
                continue
            tokens = arrays["tokens"][row, :count]
            states = arrays["states"].view(self._dtype)[row, : len(tokens)]
            table["tokens"][row, 0], table["scores"][row, 0], table["parents"][row, 0] = -1, 0, -1
            arrays["newest"][row, 0], above, first = len(tokens) - 1, 0.0, 0
            for level in range(1, self._levels + 1):
                positions = length + first + np.arange(len(tokens)) + arrays["deltas"][row]
                angles = positions[:, None] * rope["frequencies"]
                run = HeadRun(
                    embeds=embedding[tokens][None],
                    states=states[None],
                    cos=np.cos(angles),
                    sin=np.sin(angles),
                    position_ids=np.arange(len(tokens))[None],
                    kv_length=np.array([length + first + len(tokens)]),
                    last_token_ids=np.array([[len(tokens) - 1]]),
                    caches=[(caches["key_cache_0"][row : row + 1], caches["value_cache_0"][row : row + 1])],
                )
                logits, following = run_head(self._shape, self._layers, self._norm, self._lm_head, run)
                best = int(logits[0, 0].argmax())
                above -= float(np.log(np.exp(logits[0, 0] - logits[0, 0, best]).sum()))
                table["tokens"][row, level], table["scores"][row, level] = ids[best], above
                table["parents"][row, level] = level - 1
                first += len(tokens)
                tokens, states = ids[best : best + 1], following[0, -1:].astype(self._dtype)
            size = tree["tokens"].shape[1]
            tree["tokens"][row] = [arrays["last_tokens"][row], *table["tokens"][row, 1:size]]
            tree["parents"][row], tree["depths"][row] = np.arange(size) - 1, np.arange(size)
            arrays["lengths"][row] += count
        table["nodes"][:, :, 0] = 1 + np.arange(self._levels - 1)


def _layer(layer: FusedLayerWeights, shapes: dict[str, tuple[int, ...]], dtype: np.dtype) -> LayerArrays:
    given = {field.name for field in dataclasses.fields(layer) if getattr(layer, field.name)}
    assert given == set(shapes), f"weights {sorted(given)}, expected {sorted(shapes)}"
    return LayerArrays(**{name: array_at(getattr(layer, name), shapes[name], dtype) for name in shapes})
