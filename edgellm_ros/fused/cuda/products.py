# SPDX-License-Identifier: Apache-2.0
"""CublasProducts: products of many rows with weights, by cuBLASLt.

ONNX Runtime needs the library too, so it is there. Which of its kernels computes a product is the first
choice of its heuristic, which depends on sizes and GPU alone: a product has the same bits in every run.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from cuda.pathfinder import load_nvidia_dynamic_lib

from edgellm_ros.engine.cuda.device import CudaDevice
from edgellm_ros.engine.errors import EngineError

WORKSPACE_BYTES = 32 << 20  # as NVIDIA recommends for Hopper
# Values of cublas_api.h, library_types.h and cublasLt.h.
COMPUTE_32F, R_32F = 68, 0
TYPES = {"fp16": 2, "bf16": 14}
PREF_MAX_WORKSPACE_BYTES = 1


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Product(NamedTuple):
    """How cuBLASLt computes a product of these sizes."""

    weights: ctypes.c_void_p  # layouts of the matrices
    x: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm


class CublasProducts:
    """Products on one device; dtype: of rows and weights, "fp16" or "bf16".

    EngineError if cuBLASLt cannot be loaded.
    """

    def __init__(self, device: CudaDevice, dtype: str) -> None:
        try:
            self._library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
        except Exception as error:  # cuda-pathfinder has its own classes
            raise EngineError(f"cuBLASLt cannot be loaded: {error}") from None
        device.activate()
        self._device, self._type = device, TYPES[dtype]
        self._workspace = device.empty((WORKSPACE_BYTES,), np.uint8)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._handle = self._make("cublasLtCreate")
        self._operation = self._make("cublasLtMatmulDescCreate", COMPUTE_32F, R_32F)
        self._preference = self._make("cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            self._preference,
            PREF_MAX_WORKSPACE_BYTES,
            ctypes.byref(limit),
            ctypes.c_size_t(ctypes.sizeof(limit)),
        )
        self._products: dict[tuple[int, int, int, bool], _Product] = {}

    def multiply(self, x: int, weights: int, out: int, rows: int, k: int, n: int, adds: bool) -> None:
        """Queue out [rows,n] = x [rows,k] weights [k,n]; see `Products`."""
        self._device.activate()
        key = rows, k, n, adds
        product = self._products.get(key) or self._choose(*key)
        self._call(
            "cublasLtMatmul",
            self._handle,
            self._operation,
            ctypes.byref(self._one),
            ctypes.c_void_p(weights),
            product.weights,
            ctypes.c_void_p(x),
            product.x,
            ctypes.byref(self._one if adds else self._zero),
            ctypes.c_void_p(out),
            product.out,
            ctypes.c_void_p(out),
            product.out,
            ctypes.byref(product.algorithm),
            ctypes.c_void_p(self._workspace.pointer),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(int(self._device.stream.handle)),
        )

    def _choose(self, rows: int, k: int, n: int, adds: bool) -> _Product:
        """Let the library choose the kernel of a product.

        The library's matrices are column-major, so it computes the transposed product: weights [n,k] times x
        [k,rows].
        """
        left, right = self._layout(self._type, n, k), self._layout(self._type, k, rows)
        result = self._layout(R_32F if adds else self._type, n, rows)
        found, count = _Heuristic(), ctypes.c_int(0)
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._operation,
            left,
            right,
            result,
            result,
            self._preference,
            1,
            ctypes.byref(found),
            ctypes.byref(count),
        )
        if not count.value or found.state:
            raise EngineError(f"cuBLASLt has no kernel for [{rows},{k}] times [{k},{n}]")
        self._products[rows, k, n, adds] = product = _Product(left, right, result, found.algorithm)
        return product

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        """Describe a column-major matrix of a type."""
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        return self._make("cublasLtMatrixLayoutCreate", kind, *sizes)

    def _make(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(function, ctypes.byref(made), *arguments)
        return made

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise EngineError(f"{function} failed with status {status} of cuBLAS")
