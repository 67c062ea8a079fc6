# SPDX-License-Identifier: Apache-2.0
"""Writes ONNX graphs with named nodes, late weights and external data.

Weights are read when the file is written. Every node is named after the module it comes from
(`/layers.0/attn/qkv_proj/MatMul`) and its result after the node, so that a profile of ONNX Runtime or
TensorRT reads like the model. Weights keep their tensors' names.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.checkpoint.safetensors_file import as_bytes
from edgellm_ros.builder.checkpoint.strips import pack_pairs, strips

OPSET = 24  # the first with TensorScatter; Attention, RotaryEmbedding and RMSNormalization came with 23
IR_VERSION = 12  # the one that came with opset 24
DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
KV_CACHE_DTYPES = {**DTYPES, "fp8": ir.DataType.FLOAT8E4M3FN}
FLOAT = ir.DataType.FLOAT
INT32 = ir.DataType.INT32
INT64 = ir.DataType.INT64
UINT8 = ir.DataType.UINT8
BOOL = ir.DataType.BOOL
ORT_DOMAIN = "com.microsoft"  # of ONNX Runtime's own operators
INLINE_BYTES = 256  # larger constants of floats are in the file of weights, as are all weights

Dim = int | str
Place = tuple[str, int]  # name of a file of weights, offset in it


def weights_file(graph_file: str) -> str:
    """Return the name of the file with a graph's weights, beside the graph's file."""
    return f"{graph_file}.data"


class Weight(ir.LazyTensor):
    """A weight that is read, converted and written in strips when the file is written."""

    def __init__(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], np.ndarray]
    ) -> None:
        super().__init__(self._load, dtype=dtype, shape=ir.Shape(shape), name=name)
        self._read = read

    def strips(self) -> Iterator[np.ndarray]:
        """Yield the weight's rows in its type; values of 4 bits as int8."""
        return strips(self._read(), np.dtype(np.int8 if self.dtype.bitwidth == 4 else self.dtype.numpy()))

    def _load(self) -> ir.Tensor:
        array = np.concatenate(list(self.strips())) if len(self.shape) else next(self.strips())
        return ir.Tensor(array.astype(self.dtype.numpy(), copy=False), dtype=self.dtype, name=self.name)


class GraphBuilder:
    """Builds one ONNX graph from inputs to outputs.

    `dtype` is the type of weights and activations.
    """

    def __init__(self, name: str, precision: str) -> None:
        self.dtype = DTYPES[precision]
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
        self._nodes = self.graph  # where nodes go: the graph, or a branch of it
        self._scope: list[str] = []
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}
        self._shared: dict[str, Place] = {}  # weights that are in the files of another graph, by name
        self._originals: list[GraphBuilder] = []  # the graphs that have them
        self._digests: tuple[str, ...] = ()  # SHA-256 of the files of weights, once the graph is saved

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
        self._nodes.append(node)
        return node.outputs

    def either(
        self,
        condition: ir.Value,
        then: Callable[[], Sequence[ir.Value]],
        otherwise: Callable[[], Sequence[ir.Value]],
        dtypes: Sequence[ir.DataType],
    ) -> Sequence[ir.Value]:
        """Append an If with the branches that two functions add.

        Both functions add the nodes of a branch and return its results, of these types. condition: bool, one
        element. Weights, constants and inputs that a branch adds are those of the graph. A value that a
        branch makes does not exist outside of it.
        """
        outer, branches = self._nodes, []
        for name, build in (("then_branch", then), ("else_branch", otherwise)):
            self._nodes = ir.Graph([], [], nodes=[], name=name)
            with self.scope(name.removesuffix("_branch")):
                results = build()
            for value, dtype in zip(results, dtypes, strict=True):
                value.type = ir.TensorType(dtype)
                self._nodes.outputs.append(value)
            branches.append(self._nodes)
        self._nodes = outer
        then_branch, else_branch = branches
        return self.ops(
            "If", condition, outputs=len(dtypes), then_branch=then_branch, else_branch=else_branch
        )

    def weight(
        self,
        name: str,
        shape: Sequence[int],
        read: Callable[[], np.ndarray],
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """Add a weight in the graph's dtype, or in `dtype`.

        A weight that was added before is returned. `read` is called when the file is written and not before,
        so that weights need not fit in memory.
        """
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        return self._initializer(Weight(name, dtype or self.dtype, shape, read))

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

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
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
        """Write the graph to `path`, and its own weights beside it in `<path>.data`.

        Returns both; only the graph if all its weights are another's. The file of a graph with weights of its
        own contains the SHA-256 of all its files of weights, so that its own SHA-256 identifies all: a
        TensorRT plan, which contains them too, can be compared with it. A graph whose weights this one shares
        must have been saved before.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = (each for graph in self._originals for each in graph._digests)
        self._digests = tuple(dict.fromkeys(digests))
        if not self._has_file():
            path.write_bytes(self._serialized(self._places(path.name), ()))
            return [path]
        data = path.with_name(weights_file(path.name))
        digest = hashlib.sha256()
        with data.open("wb") as file:
            for tensor in self._external():
                written = 0
                for block in tensor.strips() if isinstance(tensor, Weight) else [tensor.numpy()]:
                    block = pack_pairs(block) if tensor.dtype.bitwidth == 4 else block
                    digest.update(as_bytes(block))
                    written += file.write(as_bytes(block))
                if written != tensor.nbytes:
                    raise ValueError(f"{path}: {tensor.name!r} has {written} bytes, not {tensor.nbytes}")
        self._digests += (digest.hexdigest(),)
        path.write_bytes(self._serialized(self._places(path.name), self._digests))
        return [path, data]

    def saved_sizes(self, path: Path) -> dict[Path, int]:
        """Return the sizes of the files that `save` writes; no weight is read."""
        files, own = self._weights_files(), self._has_file()
        digests = (hashlib.sha256().hexdigest(),) * (len(files) if own else 0)
        sizes = {path: len(self._serialized(self._places(path.name), digests, sizes_only=True))}
        if own:
            sizes[path.with_name(weights_file(path.name))] = sum(each.nbytes for each in self._external())
        return sizes

    def share_weights(self, original: GraphBuilder, file: str, own: bool = False) -> None:
        """Take weights from the files of `original`.

        `original` is saved as `file` in the same folder. Weights of several graphs can be taken, one call for
        each. own: whether the graph may have weights that the original lacks; else they are a ValueError, as
        are weights of another shape or type.
        """
        weights, places = dict(original.weights_by_name()), original._places(file)
        for name, weight in self.weights_by_name():
            given = weights.get(name)
            if given is None and own:
                continue
            if given is None or (given.shape, given.dtype) != (weight.shape, weight.dtype):
                raise ValueError(f"{original.graph.name} has no weight {name!r}, which its variant needs")
            if name in places:
                self._shared[name] = places[name]
        self._originals.append(original)

    def weights_by_name(self) -> Iterator[tuple[str, Weight]]:
        """Yield name and tensor of each weight."""
        for name, value in self.graph.initializers.items():
            if isinstance(value.const_value, Weight):
                yield name, value.const_value

    def stored_weights(self, file: str) -> dict[str, Place]:
        """Return the place of each weight and large constant, for a graph saved as `file`."""
        return self._places(file)

    def _external(self) -> list[ir.TensorProtocol]:
        """List the tensors in the graph's own file of weights, in its order.

        Constants of a graph that shares weights are in the graph's file, whatever their size: most such
        graphs have no weights of their own, and so no second file.
        """
        tensors = [value.const_value for value in self.graph.initializers.values()]
        return [
            tensor
            for tensor in tensors
            if tensor is not None
            and tensor.name not in self._shared
            and (isinstance(tensor, Weight) or (not self._originals and _is_large(tensor)))
        ]

    def _places(self, name: str) -> dict[str, Place]:
        """Return the place of each tensor in a weights file, for a graph saved as `name`."""
        tensors, file = self._external(), weights_file(name)
        offsets = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=0)
        own = {str(tensor.name): (file, offset) for tensor, offset in zip(tensors, offsets, strict=False)}
        return self._shared | own

    def _has_file(self) -> bool:
        """Tell whether the graph has a file of weights of its own."""
        return not self._originals or bool(self._external())

    def _weights_files(self) -> list[GraphBuilder]:
        """List the graphs with the files of weights that this one needs, its own last."""
        shared = [owner for graph in self._originals for owner in graph._weights_files()]
        return [*dict.fromkeys(shared), *([self] if self._has_file() else [])]

    def _serialized(
        self, places: Mapping[str, Place], digests: Sequence[str], sizes_only: bool = False
    ) -> bytes:
        """Serialize the graph; digests: SHA-256 of its files of weights.

        With `sizes_only` the weights in the graph's own file are zeros.
        """
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="edgellm_ros")
        if digests:
            model.metadata_props["weights_sha256"] = ",".join(digests)
        values = list(self.graph.initializers.values())
        tensors = [value.const_value for value in values]
        try:
            for value, tensor in zip(values, tensors, strict=True):
                name = str(value.name)
                if tensor is not None and name in places:
                    file, offset = places[name]
                    shape = ir.Shape(tensor.shape.numpy())
                    value.const_value = ir.ExternalTensor(
                        file, offset, tensor.nbytes, tensor.dtype, shape=shape, name=name
                    )
                elif sizes_only and isinstance(tensor, Weight):
                    zeros = np.zeros(tensor.shape.numpy(), tensor.dtype.numpy())
                    value.const_value = ir.Tensor(zeros, dtype=tensor.dtype, name=name)
            return ir.to_proto(model).SerializeToString()
        finally:
            for value, tensor in zip(values, tensors, strict=True):
                value.const_value = tensor

    def _initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        tensor_type = ir.TensorType(tensor.dtype)
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=tensor.name, type=tensor_type, shape=shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value


def _is_large(constant: ir.TensorProtocol) -> bool:
    """Tell whether a constant is in a file of weights.

    Integers never are: ONNX Runtime infers shapes from them before it reads such files.
    """
    return constant.dtype != INT64 and constant.nbytes > INLINE_BYTES
