# SPDX-License-Identifier: Apache-2.0
"""The recurrent mixers of the fused kernels in NumPy, in float64: token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.engine_directory.recurrent_config import GATED_DELTA_NET, MAMBA2, RecurrentConfig
from edgellm_ros.fused.plan.shape import FusedShape, RecurrentShape

UNIT_EPSILON = 1e-6  # of the norms of a delta net's queries and keys
FLOAT_WEIGHTS = ("taps", "conv_bias", "decay", "dt_bias", "skip", "mixer_norm")  # in fp32


@dataclass
class Mixed:
    """What a recurrent mixer makes of the S tokens of each sequence."""

    values: np.ndarray  # [B,S,V], the input of out_proj
    states: tuple[np.ndarray, np.ndarray]  # next ones, in the layouts of their bindings
    chain: dict[str, np.ndarray]  # [B,S,...] by name


def mixer_shapes(shape: FusedShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a recurrent mixer."""
    mixer = shape.recurrent
    assert mixer is not None
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj": (shape.hidden, mixer.in_size),
        "out_proj": (mixer.values, shape.hidden),
        "taps": (mixer.conv_kernel, mixer.channels),
        "decay": (mixer.heads,),
        "dt_bias": (mixer.heads,),
        "mixer_norm": (mixer.value_dim if mixer.delta_net else mixer.values,),
    }
    if mixer.conv_bias:
        shapes["conv_bias"] = (mixer.channels,)
    if not mixer.delta_net:
        shapes["skip"] = (mixer.heads,)
    return shapes


def state_shapes(mixer: RecurrentShape, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a layer's two states, as their bindings have them."""
    columns = mixer.state_columns
    state = batch, mixer.values // columns, mixer.key_dim, columns
    return (batch, mixer.channels, mixer.conv_kernel - 1), state


def chain_widths(mixer: RecurrentShape) -> dict[str, int]:
    """Return the values of a token that a verification outputs, by name."""
    kind = GATED_DELTA_NET if mixer.delta_net else MAMBA2
    sizes = mixer.heads, mixer.key_dim, mixer.value_dim, mixer.channels, mixer.conv_kernel
    return RecurrentConfig(kind, 1, *sizes).chain_widths


def mix(
    shape: FusedShape,
    layer: Any,
    projected: np.ndarray,
    states: tuple[np.ndarray, np.ndarray],
    valid_tokens: np.ndarray | None = None,
) -> Mixed:
    """Compute what is between in_proj and out_proj.

    layer: a `LayerArrays`; projected: [B,S,in_size]; states: of the convolution [B,C,K-1], and of the heads
    [B,groups,dk,columns]; valid_tokens [B]: the first tokens, which alone change the states; None: all.
    """
    tokens = projected.shape[1]
    valid = np.full(len(projected), tokens) if valid_tokens is None else valid_tokens
    mixer = shape.recurrent
    assert mixer is not None
    heads, sizes = mixer.heads, [mixer.channels, mixer.values]
    if mixer.delta_net:
        channels, gate, strengths, steps = np.split(projected, np.cumsum([*sizes, heads]), axis=-1)
    else:
        gate, channels, steps = np.split(projected, np.cumsum(sizes[::-1]), axis=-1)
    convolved, conv_state = _convolve(layer, channels, states[0], valid)
    steps = np.logaddexp(0, steps + layer.dt_bias)
    if mixer.delta_net:
        q, k, v = np.split(convolved, [mixer.keys, 2 * mixer.keys], axis=-1)
        q, k = (_unit(_by_heads(part, mixer.key_heads)) for part in (q, k))
        q, v, strengths = q * mixer.key_dim**-0.5, _by_heads(v, heads), 1 / (1 + np.exp(-strengths))
    else:
        v, k, q = np.split(convolved, [mixer.values, mixer.values + mixer.keys], axis=-1)
        q, k = (_by_heads(part, mixer.key_heads) for part in (q, k))
        steps = np.maximum(steps, shape.time_step_min)
        v = _by_heads(v, heads)
    logs, given = steps * layer.decay, v if mixer.delta_net else steps[..., None] * v
    state, results = _join_columns(mixer, states[1]), []
    of_heads = [np.repeat(part, heads // mixer.key_heads, axis=2) for part in (q, k)]
    for t in range(tokens):
        query, key = (part[:, t] for part in of_heads)
        before, state = state, np.exp(logs[:, t])[..., None, None] * state
        update = given[:, t]
        if mixer.delta_net:
            update = strengths[:, t, :, None] * (update - np.einsum("bnkv,bnk->bnv", state, key))
        state = state + key[..., None] * update[..., None, :]
        results.append(np.einsum("bnkv,bnk->bnv", state, query))
        state = np.where((t < valid)[:, None, None, None], state, before)
    y, flat = np.stack(results, axis=1), (*projected.shape[:2], -1)
    gate, scale = gate / (1 + np.exp(-gate)), layer.mixer_norm.astype(np.float64)
    if mixer.delta_net:
        values = (_norm(y, shape.epsilon) * scale).reshape(flat) * gate
    else:
        y = (y + layer.skip[:, None] * v).reshape(flat) * gate
        values = _norm(_by_heads(y, mixer.key_heads), shape.epsilon).reshape(flat) * scale
    chain = {"conv_inputs": channels, "keys": k.reshape(flat), "values": given.reshape(flat), "decays": logs}
    if mixer.delta_net:
        chain["strengths"] = strengths
    return Mixed(values, (conv_state, _cut_columns(mixer, state)), chain)


def _convolve(
    layer: Any, channels: np.ndarray, state: np.ndarray, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the causal convolution of channels [B,S,C] and SiLU.

    Returns the next inputs too.
    """
    taps, tokens = layer.taps.astype(np.float64), channels.shape[1]
    inputs = np.concatenate([state.astype(np.float64).swapaxes(1, 2), channels], axis=1)
    y = sum(tap * inputs[:, j : j + tokens] for j, tap in enumerate(taps))
    if layer.conv_bias is not None:
        y = y + layer.conv_bias
    last = [row[length : length + state.shape[2]] for row, length in zip(inputs, valid, strict=True)]
    return y / (1 + np.exp(-y)), np.stack(last).swapaxes(1, 2)


def _by_heads(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], heads, -1)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + UNIT_EPSILON)


def _norm(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon)


def _join_columns(mixer: RecurrentShape, state: np.ndarray) -> np.ndarray:
    """Convert a state [B,groups,dk,columns] to [B,heads,dk,dv], in float64."""
    cut = state.astype(np.float64).reshape(len(state), mixer.heads, -1, *state.shape[2:])
    return cut.swapaxes(2, 3).reshape(len(state), mixer.heads, mixer.key_dim, mixer.value_dim)


def _cut_columns(mixer: RecurrentShape, state: np.ndarray) -> np.ndarray:
    """Convert a state [B,heads,dk,dv] to [B,groups,dk,columns]."""
    cut = state.reshape(*state.shape[:3], -1, mixer.state_columns).swapaxes(2, 3)
    return cut.reshape(state_shapes(mixer, len(state))[1])
