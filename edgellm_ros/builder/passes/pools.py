# SPDX-License-Identifier: Apache-2.0
"""Graphs for ONNX Runtime's CUDA provider: maxima in place of poolings.

The provider has no MaxPool in these opsets. It would compute MaxPool on the CPU, between copies to the host
and back, which no CUDA graph can record; in bf16 it refuses the graph (ONNX Runtime 1.31, opset 24).
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.nodes import Nodes

AXES = (2, 3)
END = 2**31 - 1


def pool_by_maxima(graph: ir.Graph) -> bool:
    """Make poolings of windows 3 x 3 with stride 2 from slices and maxima.

    The padding is one pixel. The result is exact. Returns whether the graph has any. ValueError for
    another pooling.
    """
    pools = [node for node in graph if node.op_type == "MaxPool"]
    for node in pools:
        sizes = {name: list(node.attributes[name].as_ints()) for name in node.attributes}
        if sizes != {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}:
            raise ValueError(f"{node.name}: expected windows of 3 x 3, stride 2 and padding 1, found {sizes}")
        new, (x,) = Nodes(node.name or ""), node.inputs
        assert x is not None
        for axis in AXES:
            x = _halved(new, x, axis)
        graph.insert_before(node, new.nodes)
        ir.convenience.replace_all_uses_with(node.outputs[0], x)
        graph.remove(node, safe=True)
    return bool(pools)


# x [.., s, ..] -- Concat (first, x, last) --+-- Slice (from 0, every second) --+
#                                            +-- Slice (from 1) ---------------- Max -->
#                                            +-- Slice (from 2) ----------------+
def _halved(new: Nodes, x: ir.Value, axis: int) -> ir.Value:
    """Add the maxima around every second value of an axis: s -> (s + 1) / 2.

    Each maximum is of three neighbours. A border is its own neighbour, which changes no maximum.
    """

    def cut(value: ir.Value, start: int, end: int, step: int = 1) -> ir.Value:
        return new.op("Slice", value, *(new.constant([each]) for each in (start, end, axis, step)))

    wide = new.op("Concat", cut(x, 0, 1), x, cut(x, -1, END), axis=axis)
    return new.op("Max", *(cut(wide, start, end, 2) for start, end in ((0, -2), (1, -1), (2, END))))
