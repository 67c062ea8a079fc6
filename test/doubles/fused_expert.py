# SPDX-License-Identifier: Apache-2.0
"""The action expert's kernels in NumPy: an Euler step in float64, for tests.

`velocity` computes on arrays. `HostFusedExpert` has the interface
of `FusedExpert` and computes on host memory by address, so that the whole runtime can run on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from doubles.deferred_device import DeferredDevice
from doubles.fused_decoder import TYPES, array_at, rms_norm
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.expert_weights import ExpertWeights
from edgellm_ros.fused.plan.expert_shape import ExpertShape
from edgellm_ros.kernels import ConditionedStep

Arrays = Mapping[str, np.ndarray]


def layer_shapes(shape: ExpertShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights."""
    hidden, inner = shape.hidden, shape.inner
    return {
        "input_norm": (hidden,),
        "qkv": (hidden, shape.qkv_size),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "o": (shape.q_size, hidden),
        "post_norm": (hidden,),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }


def outer_shapes(shape: ExpertShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights around the layers."""
    hidden, actions = shape.hidden, shape.actions
    return {
        "in_proj": (actions, hidden),
        "norm": (hidden,),
        "out_proj": (hidden, actions),
        "out_bias": (actions,),
    }


@dataclass
class Inputs:
    """Inputs of a step as arrays."""

    trajectory: np.ndarray  # [n,T,A]
    time_row: np.ndarray  # [H] or [T,H]
    cos: np.ndarray  # [1,T,R/2]
    sin: np.ndarray
    length: int
    caches: dict[int, tuple[np.ndarray, np.ndarray]]  # [1,Hkv,C,D], by number


def velocity(shape: ExpertShape, layers: list[Arrays], outer: Arrays, inputs: Inputs) -> np.ndarray:
    """Compute the velocity [n,T,A] in float64."""
    x = inputs.trajectory.astype(np.float64) @ _wide(outer["in_proj"]) + _wide(inputs.time_row)
    for cache, layer in zip(shape.kv_caches, layers, strict=True):
        normed = rms_norm(x, layer["input_norm"], shape.epsilon)
        x = x + _attention(shape, layer, normed, inputs, inputs.caches[cache]) @ _wide(layer["o"])
        normed = rms_norm(x, layer["post_norm"], shape.epsilon)
        gate, up = np.split(normed @ _wide(layer["gate_up"]), 2, axis=-1)
        x = x + gate / (1 + np.exp(-gate)) * up @ _wide(layer["down"])
    return rms_norm(x, outer["norm"], shape.epsilon) @ _wide(outer["out_proj"]) + _wide(outer["out_bias"])


def _attention(
    shape: ExpertShape, layer: Arrays, x: np.ndarray, inputs: Inputs, cache: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    samples, steps, _ = x.shape
    split = [shape.q_size, shape.q_size + kv_heads * size]
    q, k, v = (
        part.reshape(samples, steps, -1, size) for part in np.split(x @ _wide(layer["qkv"]), split, axis=-1)
    )
    q = _rotate(shape, rms_norm(q, layer["q_norm"], shape.epsilon), inputs)
    k = _rotate(shape, rms_norm(k, layer["k_norm"], shape.epsilon), inputs)
    out = np.empty_like(q)
    for sample in range(samples):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            keys, values = (
                np.concatenate([_wide(cached[0, kv_head, : inputs.length]), own[sample, :, kv_head]])
                for cached, own in zip(cache, (k, v), strict=True)
            )
            scores = q[sample, :, head] @ keys.T * size**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[sample, :, head] = weights / weights.sum(axis=1, keepdims=True) @ values
    return out.reshape(samples, steps, -1)


def _rotate(shape: ExpertShape, heads: np.ndarray, inputs: Inputs) -> np.ndarray:
    """Rotate the first values of heads [n,T,h,D] by the angles of their steps."""
    half = shape.rotary_dim // 2
    cos, sin = (_wide(rows)[:, :, None] for rows in (inputs.cos, inputs.sin))
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = first * cos - second * sin, second * cos + first * sin
    return np.concatenate([*turned, heads[..., 2 * half :]], axis=-1)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


class HostFusedExpert:
    """FusedExpert on host memory; on a DeferredDevice a step is queued like a kernel."""

    def __init__(self, device: Any, shape: ExpertShape, weights: ExpertWeights, max_samples: int) -> None:
        self.steps = 0
        self._device, self._shape, self._max_samples = device, shape, max_samples
        self._weights, dtype = weights, TYPES[shape.dtype]  # keeps the memory alive
        self._layers = [
            {name: array_at(getattr(layer, name), size, dtype) for name, size in layer_shapes(shape).items()}
            for layer in weights.layers
        ]
        self._outer = {
            name: array_at(getattr(weights, name), size, dtype) for name, size in outer_shapes(shape).items()
        }

    def step(
        self,
        tensors: Mapping[str, Tensor],
        time_row: Tensor,
        dt: float,
        first: bool,
        conditioned: ConditionedStep | None = None,
    ) -> None:
        self.steps += 1
        if isinstance(self._device, DeferredDevice):
            self._device.queue(lambda: self._step(tensors, time_row, dt, conditioned))
        else:
            self._step(tensors, time_row, dt, conditioned)

    def _step(
        self, tensors: Mapping[str, Tensor], time_row: Tensor, dt: float, conditioned: ConditionedStep | None
    ) -> None:
        arrays = {name: array_at(each.pointer, each.shape, each.dtype) for name, each in tensors.items()}
        trajectory = arrays["trajectory"]
        assert len(trajectory) <= self._max_samples
        caches = {i: (arrays[f"key_cache_{i}"], arrays[f"value_cache_{i}"]) for i in self._shape.kv_caches}
        inputs = Inputs(
            trajectory=trajectory,
            time_row=_time_rows(time_row, conditioned, trajectory.shape[1]),
            cos=arrays["rope_cos"],
            sin=arrays["rope_sin"],
            length=int(arrays["kv_length"][0]),
            caches=caches,
        )
        moved = velocity(self._shape, self._layers, self._outer, inputs)
        if conditioned is not None:
            previous, factors = _array(conditioned.previous), _array(conditioned.factors)
            moved = changed_velocity(moved, trajectory, previous, factors)
        trajectory += dt * moved


def changed_velocity(
    velocity: np.ndarray, trajectory: np.ndarray, previous: np.ndarray, factors: np.ndarray
) -> np.ndarray:
    """Change the velocity [n,T,A] of a step that continues a chunk."""
    strength, pull, _ = _wide(factors)[..., None]
    return strength * velocity + pull * (_wide(previous) - trajectory)


def _time_rows(time_row: Tensor, conditioned: ConditionedStep | None, steps: int) -> np.ndarray:
    """Return the time's row [H], or the rows [T,H] of a step that continues a chunk."""
    if conditioned is None:
        return _array(time_row)
    clean = np.arange(steps)[:, None] < _array(conditioned.clean)
    return np.where(clean, _array(conditioned.clean_time_row), _array(time_row))


def _array(tensor: Tensor) -> np.ndarray:
    return array_at(tensor.pointer, tensor.shape, tensor.dtype)
