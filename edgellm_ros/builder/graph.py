# SPDX-License-Identifier: Apache-2.0
"""Writes ONNX graphs with named nodes, late weights and external data.

Weights are read when the file is written. Every node is named after the module it comes from
(`/layers.0/attn/qkv_proj/MatMul`) and its result after the node, so that a profile of ONNX Runtime or
TensorRT reads like the model. Weights keep their tensors' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm_ros.engine_directory.files import sha256

OPSET = 24  # the first with TensorScatter; Attention, RotaryEmbedding and RMSNormalization came with 23
IR_VERSION = 12  # the one that came with opset 24
DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
FLOAT = ir.DataType.FLOAT
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64
BOOL = ir.DataType.BOOL
TRANSPOSED_COLUMNS = 64

Dim = int | str


class GraphBuilder:
    """Builds one ONNX graph from inputs to outputs.

    `dtype` is the type of weights and activations.
    """

    def __init__(self, name: str, precision: str) -> None:
        self.dtype = DTYPES[precision]
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
        self._scope: list[str] = []
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
        """Add a graph input.

        Dimensions are numbers or symbols such as "B".
        """
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> None:
        """Make a node's result a graph output."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self.graph.outputs.append(value)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Name nodes made inside `/<outer>/<name>/<operator>`.

        An empty name adds nothing.
        """
        self._scope.append(name)
        yield
        self._scope.pop()

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Append a node with one result; None is an input that is left out."""
        return self.ops(op_type, *inputs, outputs=1, **attributes)[0]

    def ops(
        self, op_type: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Append a node with several results; `domain` "" has ONNX's own operators."""
        if domain:
            self.graph.opset_imports[domain] = 1
        name = "/" + "/".join([*filter(None, self._scope), op_type])
        seen = self._names.get(name, 0)
        self._names[name] = seen + 1
        if seen:
            name = f"{name}_{seen}"
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}_output_{index}"
        self.graph.append(node)
        return node.outputs

    def weight(
        self,
        name: str,
        shape: Sequence[int],
        read: Callable[[], np.ndarray],
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """Add a weight in the graph's dtype, or in `dtype`.

        `read` is called when the file is written and not before, so that weights need not fit in memory.
        """
        dtype = dtype or self.dtype

        def load() -> ir.Tensor:
            return ir.Tensor(_row_major(read().astype(dtype.numpy(), copy=False)), dtype=dtype, name=name)

        return self._initializer(ir.LazyTensor(load, dtype=dtype, shape=ir.Shape(shape), name=name))

    def constant(self, value: Any, dtype: ir.DataType = INT64) -> ir.Value:
        """Add a small constant tensor (a shape, axes, a factor).

        Equal constants are shared.
        """
        array = np.asarray(value, dtype.numpy())
        key = (dtype.name, array.tobytes(), array.shape)
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = self._initializer(ir.Tensor(array, dtype=dtype, name=name))
        return self._constants[key]

    def reshape(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        """Reshape x; 0 keeps a dimension, -1 infers one."""
        return self.op("Reshape", x, self.constant(shape))

    def transpose(self, x: ir.Value, *perm: int) -> ir.Value:
        """Transpose x: dimension i of the result is dimension perm[i] of x."""
        return self.op("Transpose", x, perm=list(perm))

    def split(self, x: ir.Value, sizes: Sequence[int], axis: int) -> Sequence[ir.Value]:
        """Cut x along an axis into parts of these sizes."""
        return self.ops("Split", x, self.constant(sizes), outputs=len(sizes), axis=axis)

    def from_fp32(self, x: ir.Value) -> ir.Value:
        """Cast x from fp32 to the graph's dtype; no node if that is fp32."""
        return x if self.dtype == FLOAT else self.op("Cast", x, to=int(self.dtype))

    def to_fp32(self, x: ir.Value) -> ir.Value:
        """Cast x from the graph's dtype to fp32.

        If the graph's dtype is fp32, x is returned and no node is added.
        """
        return x if self.dtype == FLOAT else self.op("Cast", x, to=int(FLOAT))

    def save(self, path: Path) -> list[Path]:
        """Write the graph to `path` and its weights beside it in `<path>.data`.

        Returns both. The graph's file contains the SHA-256 of the weights, so that its own SHA-256 identifies
        both: a TensorRT plan, which contains them too, can be compared with it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.with_name(path.name + ".data")
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="edgellm_ros")
        ir.save(model, path, external_data=data.name)
        saved = ir.load(path)
        saved.metadata_props["weights_sha256"] = sha256(data)
        ir.save(saved, path)
        return [path, data]

    def save_variant(self, path: Path, original: Path) -> Path:
        """Write the graph beside a saved graph `original`, sharing its weights.

        ValueError for a weight that the original does not have.
        """
        saved = ir.load(original).graph.initializers
        for name, value in self.graph.initializers.items():
            if isinstance(value.const_value, ir.LazyTensor):
                if name not in saved:
                    raise ValueError(f"{original} has no weight {name!r}, which {path.name} needs")
                value.const_value = saved[name].const_value
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="edgellm_ros")
        ir.save(model, path)
        return path

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        tensor_type = ir.TensorType(tensor.dtype)
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=tensor.name, type=tensor_type, shape=shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value


def _row_major(array: np.ndarray) -> np.ndarray:
    """Return the array in row-major order: itself, or a copy of a transposed matrix.

    The copy is made in strips that fit the CPU's cache: 3 to 5 times as fast as NumPy's own order.
    """
    if array.flags.c_contiguous or array.ndim != 2:
        return np.ascontiguousarray(array)
    copy = np.empty(array.shape, array.dtype)
    for start in range(0, array.shape[1], TRANSPOSED_COLUMNS):
        columns = slice(start, start + TRANSPOSED_COLUMNS)
        copy[:, columns] = array[:, columns]
    return copy
