# SPDX-License-Identifier: Apache-2.0
"""Products: what computes products of many rows with weights; a library does."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Matrix(NamedTuple):
    """Weights of the model's type, row-major [k,columns].

    The first n columns count.
    """

    address: int
    k: int
    n: int
    columns: int = 0  # 0 = n
    transposed: bool = False  # stored as [n,k]


class Products(Protocol):
    """Products of rows with weights; `CublasProducts` on a GPU."""

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
        """Queue out [rows,n] = x [rows,k] times a matrix.

        x, out: addresses of row-major values of the model's type.

        - adds: out is fp32, and the product is added to it
        - wide: out is fp32
        - bias: address of a bias [n], added to the product; 0 = none
        - gelu: out is GELU (with tanh) of the product and the bias

        Neither `adds`, `wide` nor transposed matrices go with a bias.
        """
        ...
