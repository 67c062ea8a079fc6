# SPDX-License-Identifier: Apache-2.0
"""HostProducts: products of many rows with weights in NumPy, on host memory."""

from __future__ import annotations

import numpy as np

from doubles.fused_decoder import TYPES, array_at
from edgellm_ros.fused.products import Matrix


class HostProducts:
    """CublasProducts on host memory; dtype: of the model, "fp16" or "bf16"."""

    def __init__(self, dtype: str) -> None:
        self._dtype = TYPES[dtype]

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
        address, k, n, columns, transposed = matrix
        stored = array_at(address, (n, k) if transposed else (k, columns or n), self._dtype).astype(
            np.float32
        )
        weights = stored.T if transposed else stored[:, :n]
        inputs = array_at(x, (rows, k), self._dtype).astype(np.float32)
        # Row by row: in one product of all rows, a row's bits depend on its place on some processors.
        product = np.stack([row @ weights for row in inputs])
        if bias:
            product += array_at(bias, (n,), self._dtype).astype(np.float32)
        if gelu:
            inner = (2 / np.pi) ** 0.5 * (product + 0.044715 * product**3)
            product = 0.5 * product * (1 + np.tanh(inner))
        result = array_at(out, (rows, n), np.dtype(np.float32) if adds or wide else self._dtype)
        result[...] = result + product if adds else product
