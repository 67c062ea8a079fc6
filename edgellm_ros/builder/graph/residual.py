# SPDX-License-Identifier: Apache-2.0
"""Residual connections with the norms behind them, as operators or one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder


@dataclass(frozen=True)
class Product:
    """The result of a linear layer whose bias is not added yet."""

    rows: ir.Value  # [...,size]
    bias: ir.Value  # [size]

    def with_bias(self, graph: ModelBuilder) -> ir.Value:
        """Add the bias."""
        return graph.op("Add", self.rows, self.bias)


@dataclass(frozen=True)
class NormSizes:
    """Norm over the last dimension."""

    size: int
    epsilon: float
    rms: bool = False  # an RMSNorm, no LayerNorm

    def norm(self, graph: ModelBuilder, name: str, x: ir.Value) -> ir.Value:
        """Add the norm `name` of x."""
        add = graph.rms_norm if self.rms else graph.layer_norm
        return add(name, x, self.size, self.epsilon)


def product(graph: ModelBuilder, name: str, x: ir.Value, fan_in: int, fan_out: int) -> Product:
    """Add a linear layer without its bias."""
    return Product(graph.linear(name, x, fan_in, fan_out), graph.tensor(f"{name}.bias", fan_out))


def add_norm(
    graph: ModelBuilder, sizes: NormSizes, name: str, x: ir.Value, added: Product, *, cuda: bool
) -> tuple[ir.Value, ir.Value]:
    """Add a residual connection and the norm `name` of its sum; return both.

    cuda: bias, sum and norm are one operator, which ONNX Runtime alone has.
    """
    if not cuda:
        x = graph.op("Add", x, added.with_bias(graph))
        return x, sizes.norm(graph, name, x)
    with graph.module(name):
        kind, parameters = "SkipSimplifiedLayerNormalization", [graph.tensor("weight", sizes.size)]
        if not sizes.rms:
            kind = "SkipLayerNormalization"
            parameters.append(graph.tensor("bias", sizes.size))
        normed, *_, total = graph.ops(
            kind,
            added.rows,
            x,
            *parameters,
            added.bias,
            outputs=4,
            domain=ORT_DOMAIN,
            epsilon=sizes.epsilon,
        )
    return total, normed
