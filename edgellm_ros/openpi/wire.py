# SPDX-License-Identifier: Apache-2.0
"""openpi's messages: msgpack with arrays of NumPy as maps whose keys are bytes.

    array    {b"__ndarray__": true, b"data": bytes, b"dtype": "<f4", b"shape": [...]}
    number   {b"__npgeneric__": true, b"data": number, b"dtype": "<f4"}

What is read comes from a network: no code is executed, and every message is either read or refused with a
ValueError in one line. Sizes are bounded by that of the message, which the caller bounds.

Source: openpi-client 0.1.2, msgpack_numpy.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from edgellm_ros.echo import quoted

MISSING = "openpi's protocol needs msgpack and websockets: pip install 'edgellm[openpi]'"
MAX_DEPTH = 8  # maps and lists in each other
MAX_ITEMS = 4096  # of all maps and lists of a message
MAX_DIMS = 8
DTYPE = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248])")  # signed, unsigned, floats
ARRAY, NUMBER = b"__ndarray__", b"__npgeneric__"
DATA, TYPE, SHAPE = b"data", b"dtype", b"shape"


def pack(value: Any) -> bytes:
    """Return the message of maps, lists, texts, numbers and arrays.

    ValueError for an array of another kind than booleans, integers and floats.
    """
    return _msgpack().packb(value, default=_packed)


def unpack(message: bytes) -> Any:
    """Return the content of a message; arrays are read-only.

    ValueError for a message that is not msgpack, has other types, more than MAX_ITEMS items or MAX_DEPTH
    levels, or a malformed array.
    """
    msgpack = _msgpack()
    reader = _Reader()
    try:
        value = msgpack.unpackb(
            message,
            object_hook=reader.read_map,
            list_hook=reader.read_list,
            ext_hook=_refuse_extension,
            raw=False,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
    except (
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        msgpack.exceptions.UnpackException,
    ) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"not a message of openpi's protocol: {text}") from None
    _check(value, MAX_DEPTH)
    return value


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError:
        raise ImportError(MISSING) from None
    return msgpack


def _packed(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise ValueError(f"a message has no values of type {type(value).__name__}")
    if value.dtype.kind not in "biuf":
        raise ValueError(f"arrays must be of booleans, integers or floats, got {value.dtype}")
    if isinstance(value, np.ndarray):
        return {ARRAY: True, DATA: value.tobytes(), TYPE: value.dtype.str, SHAPE: value.shape}
    return {NUMBER: True, DATA: value.item(), TYPE: value.dtype.str}


class _Reader:
    """Turns the maps of arrays into arrays, and counts items while msgpack reads."""

    def __init__(self) -> None:
        self._items = 0

    def read_list(self, value: list) -> list:
        self._count(len(value))
        return value

    def read_map(self, value: dict) -> Any:
        self._count(len(value))
        if ARRAY in value:
            return _read_array(value)
        if NUMBER in value:
            return _read_number(value)
        return value

    def _count(self, items: int) -> None:
        self._items += 1 + items
        if self._items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS} items in maps and lists")


def _read_array(value: dict) -> np.ndarray:
    if set(value) != {ARRAY, DATA, TYPE, SHAPE}:
        raise ValueError(f"an array has the keys {ARRAY!r}, data, dtype and shape, got {quoted(list(value))}")
    dtype, data, shape = _read_dtype(value[TYPE]), value[DATA], value[SHAPE]
    if not isinstance(data, bytes):
        raise ValueError(f"the data of an array must be bytes, got {type(data).__name__}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMS
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise ValueError(f"a shape must have at most {MAX_DIMS} sizes from 0, got {quoted(shape)}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array {quoted(shape)} of {dtype} has not {len(data)} bytes")
    if dtype.kind == "b":
        return np.frombuffer(data, np.uint8).reshape(shape) != 0
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_number(value: dict) -> np.generic:
    if set(value) != {NUMBER, DATA, TYPE} or type(value[DATA]) not in (bool, int, float):
        raise ValueError(f"a number has the keys {NUMBER!r}, data and dtype, got {quoted(value)}")
    return _read_dtype(value[TYPE]).newbyteorder("=").type(value[DATA])


def _read_dtype(text: Any) -> np.dtype:
    if not isinstance(text, str) or not DTYPE.fullmatch(text):
        raise ValueError(
            f"a dtype must be of booleans, integers or floats, such as '<f4', got {quoted(text)}"
        )
    return np.dtype(text)


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"an extension of msgpack (type {code})")


def _check(value: Any, depth: int) -> None:
    """Check types and levels; ValueError names what is wrong."""
    if isinstance(value, (dict, list)):
        if depth == 0:
            raise ValueError(f"more than {MAX_DEPTH} maps and lists in each other")
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise ValueError(f"keys must be texts, got {quoted(key)}")
        for each in value.values() if isinstance(value, dict) else value:
            _check(each, depth - 1)
    elif not isinstance(value, (str, bytes, bool, int, float, np.ndarray, np.generic, type(None))):
        raise ValueError(f"values of type {type(value).__name__}")
