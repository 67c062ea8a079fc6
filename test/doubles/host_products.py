# SPDX-License-Identifier: Apache-2.0
"""HostProducts: a prefill's products with weights in NumPy, on host memory."""

from __future__ import annotations

import numpy as np

from doubles.fused_decoder import TYPES, array_at


class HostProducts:
    """CublasProducts on host memory; dtype: of the model, "fp16" or "bf16"."""

    def __init__(self, dtype: str) -> None:
        self._dtype = TYPES[dtype]

    def multiply(
        self, x: int, weights: int, out: int, rows: int, k: int, n: int, adds: bool, gelu_bias: int = 0
    ) -> None:
        left, right = array_at(x, (rows, k), self._dtype), array_at(weights, (k, n), self._dtype)
        product = left.astype(np.float32) @ right.astype(np.float32)
        if gelu_bias:
            product += array_at(gelu_bias, (n,), self._dtype).astype(np.float32)
            inner = (2 / np.pi) ** 0.5 * (product + 0.044715 * product**3)
            product = 0.5 * product * (1 + np.tanh(inner))
        if adds:
            array_at(out, (rows, n), np.dtype(np.float32))[...] += product
        else:
            array_at(out, (rows, n), self._dtype)[...] = product

    def logits(
        self, x: int, head: int, out: int, rows: int, k: int, n: int, columns: int, tied: bool
    ) -> None:
        left = array_at(x, (rows, k), self._dtype).astype(np.float32)
        matrix = array_at(head, (n, k) if tied else (k, columns), self._dtype).astype(np.float32)
        array_at(out, (rows, n), np.dtype(np.float32))[...] = left @ (matrix.T if tied else matrix[:, :n])
