# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp changes in the tensors of a model, to be undone.

Source: ggml-org/llama.cpp, conversion/llama.py, qwen.py, mamba.py, granite.py and nemotron.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from edgellm_ros.builder.gguf.hybrids import value_heads
from edgellm_ros.builder.gguf.keys import Keys
from edgellm_ros.builder.gguf.reader import TensorPlace

QUERIES_OR_KEYS = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


@dataclass(frozen=True, eq=False)
class Change:
    """How to make a tensor of transformers from that of a file."""

    rows: np.ndarray | None = None  # of the file, for each row; None = the same
    columns: np.ndarray | None = None
    shape: tuple[int, ...] | None = None  # in transformers; None = the same
    values: Callable[[np.ndarray], np.ndarray] | None = None  # in fp32; None = the same


SAME = Change()


def no_change(keys: Keys, place: TensorPlace) -> Change:
    """Tell that a tensor is that of transformers."""
    del keys, place
    return SAME


def llama_change(keys: Keys, place: TensorPlace) -> Change:
    """Return the change of a Llama's tensor.

    llama.cpp puts the two rows that RoPE rotates together beside each other, transformers has them half a
    head apart.
    """
    found = QUERIES_OR_KEYS.fullmatch(place.name)
    if found is None:
        return SAME
    of_keys = found[1] == "k" and keys.has("attention.head_count_kv")
    heads = max(keys.integers("attention.head_count_kv" if of_keys else "attention.head_count"))
    rows = place.shape[0]
    if rows % (2 * heads):
        raise ValueError(
            f"{place.file}: tensor {place.name!r} has {rows} rows, no multiple of 2 x {heads} heads"
        )
    return Change(rows=np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1))


def nemotron_h_change(keys: Keys, place: TensorPlace) -> Change:
    """Return the change of a Nemotron-H's tensor.

    llama.cpp orders queries and keys as in a Llama, though they are not rotated.
    """
    module = place.name.split(".")[2] if place.name.startswith("blk.") else ""
    if module == "ssm_a":
        return Change(shape=(prod(place.shape),), values=_logarithms(place))
    if module in ("ssm_d", "ssm_norm"):
        return Change(shape=(prod(place.shape),))
    if module == "ssm_conv1d":
        return _convolution(place)
    return llama_change(keys, place)


def qwen35_change(keys: Keys, place: TensorPlace) -> Change:
    """Return the change of a Qwen3.5's tensor.

    transformers has the values' heads that share a head of keys beside each other; llama.cpp has the first
    one of each, then the second ones.
    """
    module = place.name.split(".")[2] if place.name.startswith("blk.") else place.name.split(".")[0]
    if module == "nextn":
        module = place.name.split(".")[3]
    if module.endswith("norm") and module != "ssm_norm":
        return Change(values=lambda weights: weights - np.float32(1))
    size = keys.integer("ssm.inner_size") // value_heads(keys)
    before = 2 * keys.integer("ssm.group_count") * keys.integer("ssm.state_size")
    if module == "attn_qkv":
        return Change(rows=_value_heads(keys, place, size, 0, before))
    if module == "attn_gate":
        return Change(rows=_value_heads(keys, place, size, 0))
    if module in ("ssm_alpha", "ssm_beta", "ssm_dt"):
        return Change(rows=_value_heads(keys, place, 1, 0))
    if module == "ssm_a":
        return Change(rows=_value_heads(keys, place, 1, 0), values=_logarithms(place))
    if module == "ssm_conv1d":
        return _convolution(place, _value_heads(keys, place, size, 0, before))
    if module == "ssm_out":
        return Change(columns=_value_heads(keys, place, size, 1))
    return SAME


def _value_heads(keys: Keys, place: TensorPlace, size: int, axis: int, before: int = 0) -> np.ndarray | None:
    """Return the file's index for each index of transformers.

    None stands for the same order. size: of a head along the axis. before: indices before the first head,
    whose order is the same.
    """
    heads, key_heads = value_heads(keys), keys.integer("ssm.group_count")
    if heads == key_heads:
        return None
    count = before + heads * size
    if heads % key_heads or place.shape[axis] != count:
        raise ValueError(
            f"{place.file}: tensor {place.name!r} has the shape {list(place.shape)}, expected {count} along "
            f"axis {axis}, with {heads} heads of values for {key_heads} of keys"
        )
    order = np.arange(heads * size).reshape(heads // key_heads, key_heads, size)
    return np.concatenate([np.arange(before), before + order.transpose(1, 0, 2).reshape(-1)])


def _convolution(place: TensorPlace, rows: np.ndarray | None = None) -> Change:
    """Return the change of a convolution over time, which has one channel to a filter."""
    if len(place.shape) != 2:
        return Change(rows=rows)
    return Change(rows=rows, shape=(place.shape[0], 1, place.shape[1]))


def _logarithms(place: TensorPlace) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from -exp(A_log) to A_log."""

    def logarithms(values: np.ndarray) -> np.ndarray:
        if not (values < 0).all():
            raise ValueError(f"{place.file}: tensor {place.name!r}: expected numbers below 0")
        return np.log(-values)

    return logarithms
