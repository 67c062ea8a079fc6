# SPDX-License-Identifier: Apache-2.0
"""Reads tensors of quantised layers, and refuses those that do not fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgellm_ros.builder.checkpoint.safetensors_file import FLOATS, StoredTensor

Stored = Mapping[str, StoredTensor]


def need(
    tensors: Stored, name: str, dtypes: Sequence[str], shape: Sequence[int] | None = None, why: str = ""
) -> StoredTensor:
    """Return a tensor of one of these types.

    ValueError if it is missing or of another type or shape. why: what the shape follows from, for the error.
    """
    tensor = tensors.get(name)
    if tensor is None:
        module = name.rpartition(".")[0]
        beside = next(each for each in tensors.values() if each.name.startswith(f"{module}."))
        raise ValueError(f"{beside.file}: tensor {name!r} is missing, but {beside.name!r} is there")
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}; supported: {', '.join(dtypes)}"
        )
    if shape is not None and tensor.shape != tuple(shape):
        raise ValueError(
            f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
            f"{f' for {why}' if why else ''}"
        )
    return tensor


def need_matrix(tensors: Stored, name: str, dtypes: Sequence[str]) -> StoredTensor:
    """Return a tensor of two dimensions, none of which is 0."""
    tensor = need(tensors, name, dtypes)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ValueError(
            f"{tensor.file}: tensor {name!r} has shape {list(tensor.shape)}, expected two dimensions"
        )
    return tensor


def floats(tensor: StoredTensor) -> np.ndarray:
    """Read a tensor as fp32."""
    return tensor.read().astype(np.float32)


def group_size(tensor: StoredTensor, fan_in: int, group: int, where: str) -> int:
    """Return the group of a layer whose values are in `tensor`.

    group: -1 is one group of all inputs. where: file and key of the group, for the error.
    """
    size = fan_in if group == -1 else group
    if size < 1 or fan_in % size:
        raise ValueError(
            f"{where} {group}: expected -1 or a divisor of the {fan_in} inputs of {tensor.name!r}"
        )
    return size


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unpack unsigned integers of 4 or 8 bits from 32-bit words [rows, columns].

    The lowest bits come first. axis: the axis along which the words are packed, 0 or 1.
    """
    words = np.ascontiguousarray(words).astype("<u4", copy=False)
    if axis == 1:  # the bytes of a row are in order
        packed = words.view(np.uint8)
        if bits == 8:
            return packed
        values = np.empty((len(words), 2 * packed.shape[1]), np.uint8)
        np.bitwise_and(packed, 15, out=values[:, 0::2])
        np.right_shift(packed, 4, out=values[:, 1::2])
        return values
    rows, columns = words.shape
    each = 32 // bits
    values = np.empty((rows, each, columns), np.uint8)
    for index in range(each):
        values[:, index] = (words >> np.uint32(bits * index)) & np.uint32((1 << bits) - 1)
    return values.reshape(rows * each, columns)


def signed(values: np.ndarray, bits: int) -> np.ndarray:
    """Subtract half the range from unsigned integers."""
    if bits == 8:
        return (values ^ np.uint8(128)).view(np.int8)
    return values.view(np.int8) - np.int8(1 << (bits - 1))


def zeros_or_none(zeros: np.ndarray) -> np.ndarray | None:
    """Return None if all zero points are 0."""
    return zeros if zeros.any() else None


def group_order(index: StoredTensor, groups: int, group: int) -> np.ndarray | None:
    """Return the inputs sorted by group (act-order); None if they are sorted already.

    index [K]: the group of each input.
    """
    found = index.read()
    expected = np.repeat(np.arange(groups), group)
    if np.array_equal(found, expected):
        return None
    if found.min() < 0 or found.max() >= groups:
        wrong = found[(found < 0) | (found >= groups)][0]
        raise ValueError(f"{index.file}: tensor {index.name!r} has group {wrong}, expected 0 to {groups - 1}")
    order = np.argsort(found, kind="stable")
    if not np.array_equal(found[order], expected):
        counts = np.bincount(found, minlength=groups)
        odd = int(np.flatnonzero(counts != group)[0])
        raise ValueError(
            f"{index.file}: tensor {index.name!r} has {counts[odd]} inputs in group {odd}, expected {group}"
        )
    return order.astype(np.int64)


FLOAT_TYPES = tuple(FLOATS)
