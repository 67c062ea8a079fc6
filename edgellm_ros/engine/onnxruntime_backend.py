# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime as an engine backend: a session that reads and writes our buffers by address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import Binding
from edgellm_ros.engine.tensor import Tensor

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


class OnnxRuntimeBackend:
    """One ONNX file in one session. Inputs and outputs are bound by address: nothing is copied in or out.

    ONNX Runtime's TensorScatter writes in place when its cache input and output have one address.
    """

    def __init__(self, path: Path, device: Device, threads: int = 0) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise EngineError(f"device {device.name!r} needs the package onnxruntime: {error}") from error
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found")
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), _session_options(onnxruntime, threads), providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises many classes of its own
            raise EngineError(f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load it: {error}") from error
        self._path = path
        self._io = self._session.io_binding()
        self.bindings = tuple(
            _binding(path, node, is_input)
            for nodes, is_input in ((self._session.get_inputs(), True), (self._session.get_outputs(), False))
            for node in nodes
        )

    def bind(self, profile: int, tensors: Mapping[str, Tensor], stream: Any) -> None:
        self._io.clear_binding_inputs()
        self._io.clear_binding_outputs()
        for binding in self.bindings:
            tensor = tensors[binding.name]
            bind = self._io.bind_input if binding.is_input else self._io.bind_output
            bind(binding.name, "cpu", 0, binding.dtype.type, tensor.shape, tensor.pointer)

    def run(self, stream: Any) -> None:
        try:
            self._session.run_with_iobinding(self._io)
        except Exception as error:  # onnxruntime raises many classes of its own
            raise EngineError(f"{self._path}: {error}") from error

    def capture(self, stream: Any) -> None:
        return None


def _session_options(onnxruntime: Any, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return options


def _binding(path: Path, node: Any, is_input: bool) -> Binding:
    if node.type not in DTYPES:
        raise EngineError(f"{path}: {node.name} has type {node.type}, supported are {', '.join(DTYPES)}")
    return Binding(node.name, np.dtype(DTYPES[node.type]), tuple(node.shape), is_input)
