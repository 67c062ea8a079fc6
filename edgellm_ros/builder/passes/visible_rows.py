# SPDX-License-Identifier: Apache-2.0
"""Graphs for a CPU: attention computes only KV cache rows that its mask shows.

The standard graph attends to a cache of fixed capacity with a mask. TensorRT needs this form, but ONNX
Runtime's kernel for CPUs computes the rows that no token sees too. In the graph for a CPU, keys, values and
mask are cut behind the last visible row, rounded up to a multiple of ROWS, which does not change a bit
(test/builder/test_visible_rows.py). Where to cut depends on the mask's contents, which TensorRT lacks.

A cut is a copy. In a cache of at most SMALL rows all attentions are cut: a prefill of 103 tokens takes 0.80
of the processor time, a decode step behind 120 of 448 rows 0.91, behind 440 rows 1.06 (arena, one thread). In
a larger cache a branch decides; in that model it would cost a decode step 4%. Attention with cut rows beside
attention to 2048 rows, one thread, ONNX Runtime 1.31, beside other load, by heads of queries and of keys:

    | queries | heads, size | 512 visible | 1024 | 1536 | 1984 |
    |---------|-------------|-------------|------|------|------|
    | 1       | 9, 3, 64    | 0.35        | 0.70 | 0.95 | 1.26 |
    | 16      | 9, 3, 64    | 0.26        | 0.52 | 0.76 | 0.99 |
    | 1       | 16, 8, 128  | 0.26        | 0.47 | 1.01 | 1.11 |
    | 16      | 16, 8, 128  | 0.29        | 0.54 | 0.76 | 1.04 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.nodes import Nodes

ROWS = 64
SMALL = 1024
PAYS = 0.75  # of the capacity: with more visible rows the copies take longer than the attention saves


@dataclass(frozen=True)
class _Attention:
    """An attention with a mask over keys and values that were written to a cache."""

    node: ir.Node
    inputs: Sequence[ir.Value]  # queries, keys, values, mask [B,1,S,C]
    dtype: ir.TypeProtocol | None  # of the result
    capacity: int


def attend_to_visible_rows(graph: ir.Graph) -> bool:
    """Cut the caches of a graph's attentions; return whether it has any."""
    cuts: dict[ir.Value, _Cut] = {}  # by mask
    for attention in filter(None, map(_attention, list(graph))):
        node, mask, new = attention.node, attention.inputs[3], Nodes(f"{attention.node.name}/visible")
        if mask not in cuts:
            cuts[mask] = _Cut(mask, attention.capacity, new)
        if attention.capacity <= SMALL:
            for index, part in enumerate(cuts[mask].parts(attention, new), start=1):
                node.replace_input_with(index, part)
            graph.insert_before(node, new.nodes)
        else:
            result = cuts[mask].either(attention, new)
            graph.insert_before(node, new.nodes)
            old = node.outputs[0]
            result.name, result.type, result.shape = old.name, old.type, old.shape
            ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
            graph.remove(node, safe=True)
    return bool(cuts)


def _attention(node: ir.Node) -> _Attention | None:
    """Describe a node; None if it is not such an attention."""
    inputs = [value for value in node.inputs if value is not None]
    writer = inputs[1].producer() if node.op_type == "Attention" and len(inputs) == 4 else None
    if writer is None or writer.op_type != "TensorScatter" or len(node.inputs) != 4:
        return None
    cache = writer.inputs[0]
    capacity = None if cache is None or cache.shape is None else cache.shape[2]
    if cache is None or not isinstance(capacity, int):
        return None
    return _Attention(node, inputs, cache.type, capacity)


class _Cut:
    """Where a mask [B,1,S,C] ends: after the last row that any token sees, rounded up."""

    def __init__(self, mask: ir.Value, capacity: int, new: Nodes) -> None:
        shown = new.op("Cast", mask, to=int(ir.DataType.UINT8))
        shown = new.op("ReduceMax", shown, new.constant([0, 1, 2]), keepdims=0)
        shown = new.op("Cast", shown, to=int(ir.DataType.INT64))
        end = new.op("ReduceMax", new.op("Mul", shown, new.constant(np.arange(1, capacity + 1))), keepdims=1)
        end, rows = new.op("Add", end, new.constant([ROWS - 1])), new.constant([ROWS])
        self._end = new.op("Mul", new.op("Div", end, rows), rows)
        self._mask: ir.Value | None = None
        if capacity <= SMALL:
            self._mask = _first(new, mask, self._end, 3)  # once for all layers
            return
        self._pays = new.op("LessOrEqual", self._end, new.constant([int(PAYS * capacity)]))

    def parts(self, attention: _Attention, new: Nodes) -> list[ir.Value]:
        """Add keys, values and mask without the rows that no token sees."""
        _, keys, values, mask = attention.inputs
        short = self._mask if self._mask is not None else _first(new, mask, self._end, 3)
        return [_first(new, keys, self._end, 2), _first(new, values, self._end, 2), short]

    def either(self, attention: _Attention, new: Nodes) -> ir.Value:
        """Add an If and return its result.

        The branches are attention to the visible rows, where that pays, and to all rows.
        """
        queries, *whole = attention.inputs
        attributes = {key: attribute.value for key, attribute in attention.node.attributes.items()}
        branches = []
        for name in ("then_branch", "else_branch"):
            inner = Nodes(f"{attention.node.name}/{name}")
            seen = self.parts(attention, inner) if name == "then_branch" else whole
            result = inner.op("Attention", queries, *seen, **attributes)
            result.type = attention.dtype
            branches.append(ir.Graph([], [result], nodes=inner.nodes, name=f"{attention.node.name}/{name}"))
        return new.op("If", self._pays, then_branch=branches[0], else_branch=branches[1])


def _first(new: Nodes, x: ir.Value, end: ir.Value, axis: int) -> ir.Value:
    """Keep the first `end` elements of an axis of x."""
    return new.op("Slice", x, new.constant([0]), end, new.constant([axis]))
