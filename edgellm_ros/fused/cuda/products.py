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
from edgellm_ros.fused.products import Matrix

WORKSPACE_BYTES = 32 << 20  # as NVIDIA recommends for Hopper
# Values of cublas_api.h, library_types.h and cublasLt.h.
COMPUTE_32F, R_32F = 68, 0
TYPES = {"fp16": 2, "bf16": 14}
PREF_MAX_WORKSPACE_BYTES = 1
DESC_TRANSA, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 7, 8
PLAIN, TRANSPOSED, BIAS, GELU = "plain", "transposed", "bias", "gelu"  # operations
EPILOGUES = {PLAIN: 1, TRANSPOSED: 1, BIAS: 4, GELU: 36}  # 1: none; GELU: with a bias


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


class _Kind(NamedTuple):
    """What the kernel of a product depends on; the matrix is at any address."""

    rows: int
    matrix: Matrix
    wide: bool  # the result is fp32
    operation: str


class _Product(NamedTuple):
    """How cuBLASLt computes a product of these sizes."""

    operation: ctypes.c_void_p
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
        self._operations = {kind: self._operation(kind) for kind in EPILOGUES}
        self._preference = self._make("cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._set("cublasLtMatmulPreferenceSetAttribute", self._preference, PREF_MAX_WORKSPACE_BYTES, limit)
        self._products: dict[_Kind, _Product] = {}

    def multiply(
        self,
        x: int,
        matrix: Matrix,
        out: int,
        rows: int,
        *,
        adds: bool = False,
        wide: bool = False,
        bias: int = 0,
        gelu: bool = False,
    ) -> None:
        """Queue out [rows,n] = x [rows,k] times a matrix; see `Products`."""
        if (bias or gelu) and (matrix.transposed or not bias):
            raise EngineError("GELU needs a bias, and a bias rows of weights that are not transposed")
        self._device.activate()
        operation = GELU if gelu else BIAS if bias else TRANSPOSED if matrix.transposed else PLAIN
        if bias:
            described, address = self._operations[operation], ctypes.c_void_p(bias)
            self._set("cublasLtMatmulDescSetAttribute", described, DESC_BIAS_POINTER, address)
        kind = _Kind(rows, matrix._replace(address=0), adds or wide, operation)
        product = self._products.get(kind) or self._choose(kind)
        arguments = (
            self._handle,
            product.operation,
            ctypes.byref(self._one),
            ctypes.c_void_p(matrix.address),
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
        self._call("cublasLtMatmul", *arguments)

    def _choose(self, kind: _Kind) -> _Product:
        """Let the library choose the kernel of a product.

        The library's matrices are column-major, so it computes the transposed product: weights [n,k] times x
        [k,rows].
        """
        (_, k, n, columns, transposed), rows = kind.matrix, kind.rows
        operation = self._operations[kind.operation]
        stored = (k, n, k) if transposed else (n, k, columns or n)
        left, right = self._layout(self._type, *stored), self._layout(self._type, k, rows, k)
        result = self._layout(R_32F if kind.wide else self._type, n, rows, n)
        found, count = _Heuristic(), ctypes.c_int(0)
        layouts = left, right, result, result
        results = self._preference, 1, ctypes.byref(found), ctypes.byref(count)
        self._call("cublasLtMatmulAlgoGetHeuristic", self._handle, operation, *layouts, *results)
        if not count.value or found.state:
            raise EngineError(f"cuBLASLt has no kernel for [{rows},{k}] times [{k},{n}]")
        product = _Product(operation, left, right, result, found.algorithm)
        self._products[kind] = product
        return product

    def _operation(self, kind: str) -> ctypes.c_void_p:
        """Describe a kind of product."""
        operation = self._make("cublasLtMatmulDescCreate", COMPUTE_32F, R_32F)
        values = {DESC_TRANSA: kind == TRANSPOSED, DESC_EPILOGUE: EPILOGUES[kind]}
        for attribute, value in values.items():
            self._set("cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.c_int32(value))
        return operation

    def _set(self, function: str, described: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(function, described, attribute, ctypes.byref(value), size)

    def _layout(self, kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        """Describe a column-major matrix of a type; stride: of its columns."""
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        return self._make("cublasLtMatrixLayoutCreate", kind, *sizes)

    def _make(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(function, ctypes.byref(made), *arguments)
        return made

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise EngineError(f"{function} failed with status {status} of cuBLAS")
