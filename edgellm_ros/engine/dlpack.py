# SPDX-License-Identifier: Apache-2.0
"""DLPack: tensors for other libraries, without a copy.

Source: https://dmlc.github.io/dlpack/latest, version 1.1. Written with ctypes, because NumPy and cuda.core
(1.2.2) export neither bf16 nor FP8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from edgellm_ros.engine.tensor import Tensor

VERSION = (1, 1)
CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # types of devices
KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # type codes, by NumPy's kind
NAMES = {"bfloat16": 4, "float8_e4m3fn": 10}  # type codes of types that NumPy lacks
UNVERSIONED, VERSIONED = b"dltensor", b"dltensor_versioned"  # of capsules that were not used yet


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# What capsules and their consumers use, until they call the deleter: structure, dimensions and tensor.
_exported: dict[int, tuple[Any, ...]] = {}


def _delete(address: int, exported: dict[int, tuple[Any, ...]] = _exported) -> None:
    exported.pop(address, None)


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)


def _drop_unused(
    capsule: int,
    delete: Any = _delete,
    names: Sequence[bytes] = (UNVERSIONED, VERSIONED),
    is_valid: Any = _is_valid,
    pointer: Any = _pointer,
) -> None:
    """Free what a capsule without a consumer holds.

    A consumer has renamed its capsule.
    """
    for name in names:
        if is_valid(capsule, name):
            delete(pointer(capsule, name))


# A consumer calls the deleter in any thread. Both functions are called until the process ends.
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop_unused)
for _function in (_deleter, _destructor):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_function))


def make_capsule(tensor: Tensor, device: tuple[int, int], max_version: tuple[int, int] | None) -> Any:
    """Make a capsule that keeps the tensor's memory alive as long as its consumer.

    device: DLPack's type and number of the device; max_version: the newest version that the consumer knows,
    None = before 1.0. BufferError for a type that DLPack lacks.
    """
    dtype = tensor.dtype
    code = NAMES.get(dtype.name, KINDS.get(dtype.kind))
    if code is None:
        raise BufferError(f"DLPack has no type {dtype}")
    rank = len(tensor.shape)
    strides = [int(np.prod(tensor.shape[axis + 1 :], dtype=np.int64)) for axis in range(rank)]
    dimensions = (ctypes.c_int64 * max(1, 2 * rank))(*tensor.shape, *strides)
    at = ctypes.addressof(dimensions)
    described = _DLTensor(
        data=tensor.pointer if tensor.size else None,
        device=_Device(*device),
        ndim=rank,
        dtype=_DataType(code, dtype.itemsize * 8, 1),
        shape=at,
        strides=at + 8 * rank,
        byte_offset=0,
    )
    deleter = ctypes.cast(_deleter, ctypes.c_void_p)
    managed: _Managed | _ManagedVersioned
    if max_version is None or max_version < (1, 0):
        name, managed = UNVERSIONED, _Managed(described, None, deleter)
    else:
        name, managed = VERSIONED, _ManagedVersioned(*VERSION, None, deleter, 0, described)
    address = ctypes.addressof(managed)
    _exported[address] = managed, dimensions, tensor
    return _new(address, name, ctypes.cast(_destructor, ctypes.c_void_p))
