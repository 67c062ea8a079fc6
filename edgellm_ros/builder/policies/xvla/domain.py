# SPDX-License-Identifier: Apache-2.0
"""Layers of X-VLA that each domain has its own weights of.

Source of the model: LeRobot 0.6.1, policies/xvla/soft_transformer.py (DomainAwareLinear).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.xvla.architecture import XVLAArchitecture


def domain_matrix(
    graph: ModelBuilder,
    architecture: XVLAArchitecture,
    name: str,
    sizes: tuple[int, int],
    rows: range | None = None,
    unseen: tuple[int, ...] = (),
) -> ir.Value:
    """Add the weights of a layer of the domain, as MatMul takes them [rows, fan_out].

    sizes: inputs and outputs; rows: the inputs; None = all. unseen: of the rows, those of inputs that count
    as 0.
    """
    weights, full = graph.weights, graph.full_name(f"{name}.fc.weight")
    weights.require(full, (architecture.domains, sizes[0] * sizes[1]))
    rows = range(sizes[0]) if rows is None else rows

    def read() -> np.ndarray:
        matrix = weights.read(full)[architecture.domain].reshape(sizes)[rows.start : rows.stop].copy()
        matrix[list(unseen)] = 0
        return matrix

    part = full if len(rows) == sizes[0] else f"{full}.{rows.start}"
    return graph.weight(part, (len(rows), sizes[1]), read)


def domain_bias(graph: ModelBuilder, architecture: XVLAArchitecture, name: str, size: int) -> ir.Value:
    """Add the bias [size] of a layer of the domain."""
    weights, full = graph.weights, graph.full_name(f"{name}.bias.weight")
    weights.require(full, (architecture.domains, size))
    return graph.weight(full, (size,), lambda: weights.read(full)[architecture.domain])


def domain_linear(
    graph: ModelBuilder, architecture: XVLAArchitecture, name: str, x: ir.Value, sizes: tuple[int, int]
) -> ir.Value:
    """Add a linear layer of the domain, x [...,fan_in] -> [...,fan_out]."""
    with graph.scope(name):
        y = graph.op("MatMul", x, domain_matrix(graph, architecture, name, sizes))
        return graph.op("Add", y, domain_bias(graph, architecture, name, sizes[1]))
