# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of an ONNX file, with symbolic dimensions.

A TensorRT plan does not keep the symbols.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.errors import EngineError


def read_bindings(path: Path) -> tuple[Binding, ...]:
    """Read inputs, then outputs, in the graph's order, without the weights.

    FileNotFoundError, or EngineError for a file that is not readable.
    """
    graph = load_model(path).graph
    return tuple(
        _binding(path, value, is_input)
        for values, is_input in ((graph.inputs, True), (graph.outputs, False))
        for value in values
    )


def load_model(path: Path) -> Any:
    """Load an ONNX file as an `onnx_ir.Model`, without the weights in other files.

    FileNotFoundError, or EngineError for a file that is not readable.
    """
    import onnx_ir as ir

    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    try:
        return ir.load(path)
    except Exception as error:  # protobuf and onnx raise their own classes
        raise EngineError(f"{path}: not a readable ONNX file: {error}") from None


def _binding(path: Path, value: Any, is_input: bool) -> Binding:
    if value.dtype is None or value.shape is None:
        raise EngineError(f"{path}: {value.name} has no type or no shape")
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return Binding(value.name, value.dtype.numpy(), shape, is_input)
