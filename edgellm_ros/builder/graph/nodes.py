# SPDX-License-Identifier: Apache-2.0
"""Nodes for a graph that exists already."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir


class Nodes:
    """Makes nodes with names below `scope`; the caller puts them into the graph."""

    def __init__(self, scope: str) -> None:
        self.nodes: list[ir.Node] = []
        self._scope = scope

    def op(self, op_type: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        """Make a node and return its result."""
        name = f"{self._scope}/{op_type}_{len(self.nodes)}"
        self.nodes.append(ir.node(op_type, inputs, attributes, domain=domain, name=name, num_outputs=1))
        result = self.nodes[-1].outputs[0]
        result.name = f"{name}_output_0"
        return result

    def constant(self, value: Any) -> ir.Value:
        """Make a constant i64."""
        return self.op("Constant", value=ir.tensor(np.asarray(value, np.int64)))
