# SPDX-License-Identifier: Apache-2.0
"""The functions of cuBLASLt that CublasProducts calls, on host memory.

Source: cublasLt.h. Descriptors are dictionaries behind handles. A product reads its matrices as the layouts
describe them, column-major, and is computed in NumPy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from doubles.fused_decoder import array_at

TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}  # cudaDataType
TRANSA, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
EPILOGUE_DEFAULT, EPILOGUE_BIAS, EPILOGUE_GELU_BIAS = 1, 4, 36


class CublasDouble:
    """The library; `status`: what a function of this name returns in place of 0."""

    def __init__(self, status: dict[str, int] | None = None) -> None:
        self._status = status or {}
        self._made: list[dict[Any, Any]] = [{}]  # by handle; 0 is none
        self.chosen: list[tuple[int, ...]] = []  # rows and columns of the matrices of each choice
        self.kernels = 1  # how many a choice finds

    def __getattr__(self, name: str) -> Any:
        function = f"_{name.removeprefix('cublasLt')}"
        return lambda *arguments: self._status.get(name) or getattr(self, function)(*arguments)

    def _new(self, handle: Any, **contents: Any) -> int:
        handle._obj.value = len(self._made)
        self._made.append(contents)
        return 0

    def _of(self, handle: ctypes.c_void_p) -> dict[Any, Any]:
        assert handle.value
        return self._made[handle.value]

    def _Create(self, handle: Any) -> int:
        return self._new(handle)

    def _MatmulDescCreate(self, handle: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._new(handle)

    def _MatmulPreferenceCreate(self, handle: Any) -> int:
        return self._new(handle)

    def _MatrixLayoutCreate(self, handle: Any, kind: int, rows: Any, columns: Any, stride: Any) -> int:
        assert stride.value >= rows.value
        return self._new(handle, kind=kind, size=(rows.value, columns.value), stride=stride.value)

    def _set(self, described: ctypes.c_void_p, attribute: int, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == size.value
        self._of(described)[attribute] = value._obj.value
        return 0

    _MatmulDescSetAttribute = _MatmulPreferenceSetAttribute = _set

    def _MatmulAlgoGetHeuristic(
        self, handle: Any, operation: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, asked: int,
        found: Any, count: Any,
    ) -> int:  # fmt: skip
        assert self._of(preference)[1] == 32 << 20
        assert asked == 1
        assert c is d
        self.chosen.append((*self._of(a)["size"], *self._of(b)["size"]))
        found._obj.algorithm.data[0] = len(self.chosen)
        count._obj.value = self.kernels
        return 0

    def _Matmul(
        self, handle: Any, operation: Any, alpha: Any, a: Any, a_layout: Any, b: Any, b_layout: Any,
        beta: Any, c: Any, c_layout: Any, d: Any, d_layout: Any, algorithm: Any, workspace: Any,
        nbytes: Any, stream: Any,
    ) -> int:  # fmt: skip
        assert algorithm._obj.data[0]
        assert (workspace.value, stream.value) != (None, None)
        assert alpha._obj.value == 1
        assert c.value == d.value
        described = self._of(operation)
        left, right = self._matrix(a, a_layout), self._matrix(b, b_layout)
        product = (left.T if described[TRANSA] else left) @ right
        epilogue = described[EPILOGUE]
        assert epilogue in (EPILOGUE_DEFAULT, EPILOGUE_BIAS, EPILOGUE_GELU_BIAS)
        if epilogue != EPILOGUE_DEFAULT:
            kind = TYPES[self._of(d_layout)["kind"]]
            product = product + array_at(described[BIAS_POINTER], (len(product),), kind)[:, None]
        if epilogue == EPILOGUE_GELU_BIAS:
            product = 0.5 * product * (1 + np.tanh((2 / np.pi) ** 0.5 * (product + 0.044715 * product**3)))
        result = self._view(d, d_layout)
        result[...] = product + beta._obj.value * result.astype(np.float64) if beta._obj.value else product
        return 0

    def _view(self, pointer: Any, layout: Any) -> np.ndarray:
        described = self._of(layout)
        (rows, columns), stride = described["size"], described["stride"]
        return array_at(pointer.value, (columns, stride), TYPES[described["kind"]]).T[:rows]

    def _matrix(self, pointer: Any, layout: Any) -> np.ndarray:
        return self._view(pointer, layout).astype(np.float64)
