# SPDX-License-Identifier: Apache-2.0
"""Types and ranks of a graph's values, for the rules about nodes."""

from __future__ import annotations

import onnx_ir as ir

Type = ir.DataType
TO_BOOL = {
    "And",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "IsInf",
    "IsNaN",
    "Less",
    "LessOrEqual",
    "Not",
    "Or",
    "Xor",
}
RANKS = {"Shape": 1, "Size": 0, "Range": 1, "Flatten": 2, "GatherND": None}  # whatever the inputs' ranks are
TO_INT64 = {"ArgMax", "ArgMin", "Shape", "Size"}


class Values:
    """Types and ranks of a graph's values; grows as nodes are added."""

    def __init__(self, graph: ir.Graph) -> None:
        self.inputs, self.outputs = set(graph.inputs), set(graph.outputs)
        self._types: dict[ir.Value, ir.DataType | None] = {}
        self._ranks: dict[ir.Value, int | None] = {}

    def type(self, value: ir.Value | None) -> ir.DataType | None:
        return None if value is None else self._types.get(value, value.dtype)

    def rank(self, value: ir.Value | None) -> int | None:
        if value is None or value in self._ranks:
            return self._ranks.get(value) if value is not None else None
        return None if value.shape is None else len(value.shape)

    def add(self, node: ir.Node) -> None:
        """Infer types and ranks of a node's results from those of its inputs."""
        kind = self._result_type(node)
        rank = self._result_rank(node)
        for value in node.outputs:
            self._types[value] = value.dtype or kind
            self._ranks[value] = rank if value.shape is None else len(value.shape)
        if node.op_type == "TopK":
            self._types[node.outputs[1]] = Type.INT64

    def _result_type(self, node: ir.Node) -> ir.DataType | None:
        if node.op_type in TO_BOOL:
            return Type.BOOL
        if node.op_type in TO_INT64:
            return Type.INT64
        if node.op_type == "Cast":
            return Type(node.attributes["to"].as_int())
        if node.op_type in ("Constant", "ConstantOfShape"):
            value = node.attributes.get("value")
            return value.as_tensor().dtype if value else None
        return self.type(data_input(node))

    def _result_rank(self, node: ir.Node) -> int | None:
        ranks = [self.rank(value) for value in node.inputs]
        first = ranks[0] if ranks else None
        if node.op_type == "DequantizeLinear":
            return first
        operand = node.inputs[1] if len(node.inputs) > 1 else None
        if node.op_type in ("Reshape", "Expand"):
            return None if operand is None else self._length(operand)
        if node.op_type in ("Unsqueeze", "Squeeze"):
            axes = None if operand is None else operand.const_value
            if first is None or axes is None:
                return None
            return first + axes.size * (1 if node.op_type == "Unsqueeze" else -1)
        if node.op_type == "Gather":
            second = ranks[1]
            return None if first is None or second is None else first + second - 1
        if node.op_type.startswith(("Reduce", "Arg")):
            keeps = node.attributes.get("keepdims")
            return first if keeps is None or keeps.as_int() else None
        if node.op_type in RANKS:
            return RANKS[node.op_type]
        if node.op_type == "ConstantOfShape":
            return self._length(node.inputs[0])
        if node.op_type == "OneHot":
            return None if first is None else first + 1
        known = [rank for rank in ranks if rank is not None]
        return max(known) if len(known) == len(ranks) and known else first

    def _length(self, value: ir.Value | None) -> int | None:
        """Count the elements of a vector made of constants and shapes; None if unknown."""
        if value is None:
            return None
        if value.const_value is not None:
            return value.const_value.size
        maker = value.producer()
        if maker is not None and maker.op_type == "Shape":
            rank = self.rank(maker.inputs[0])
            bounds = (maker.attributes.get("start"), maker.attributes.get("end"))
            start, end = (None if bound is None else bound.as_int() for bound in bounds)
            return None if rank is None else len(range(rank)[start:end])
        if maker is not None and maker.op_type == "Concat":
            lengths = [self._length(part) for part in maker.inputs]
            known = [length for length in lengths if length is not None]
            return sum(known) if len(known) == len(lengths) else None
        return None


def data_input(node: ir.Node) -> ir.Value | None:
    """Return the input whose type is the operator's type."""
    index = {"Where": 1, "OneHot": 2, "DequantizeLinear": 1}.get(node.op_type, 0)
    return node.inputs[index] if len(node.inputs) > index else None
