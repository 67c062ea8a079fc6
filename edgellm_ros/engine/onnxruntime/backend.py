# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime as an engine backend, on our buffers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device, DeviceGraph
from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.engine.onnxruntime.session import open_session, run_options
from edgellm_ros.engine.onnxruntime.shared_initializers import element_type, values_over
from edgellm_ros.engine.tensor import Tensor, bfloat16, float8

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
LATE_DTYPES = {"tensor(bfloat16)": bfloat16, "tensor(float8e4m3fn)": float8}  # made when they are needed


class OnnxRuntimeBackend:
    """One ONNX file in one session.

    `shared`: weights in memory of the caller, by name of the initializer. Inputs and outputs are bound by
    address, without copies. ONNX Runtime's TensorScatter writes in place if its cache input and output have
    the same address.

    On a CPU, sequences of a batch do not change each other's bits, as long as they share only these operators
    (ONNX Runtime 1.31 on x86-64, 1 to 8 threads; tested by test/engine/test_batch_invariance.py):

    - MatMul with a constant weight, fp32 or fp16: the weights are packed once, and every row is computed in
      the same way, also a single row.
    - MatMulIntegerToFloat: sums of integers are exact (builder/passes/int8_products.py).
    - Gemm of two activations with transA: a single row is computed like any other, and long sums are split
      every 128 terms (builder/graph/lora.py).
    - Attention: heads are computed one by one. Two or more queries of a head (prefill) give the same bits for
      any number of queries; a single query (decode) is computed differently and differs in the last bits.

    This does not hold for quantised weights, of which a single row is computed differently from several. Nor
    does it for MatMul of two activations, where a single row and the number of threads and matrices change
    the order of summation: engines with such products (the action head) are run with shapes that depend on
    one request alone. On a GPU the shape of a product selects the kernel, so other sequences of a batch may
    change the last bits.
    """

    supports_empty_tensors = True

    def __init__(
        self, path: Path, device: Device, threads: int = 0, shared: Mapping[str, Tensor] | None = None
    ) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise EngineError(f"device {device.name!r} needs the package onnxruntime: {error}") from error
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found")
        try:
            self._shared = dict(shared or {})
            self._values = values_over(self._shared, device.memory)
            self._session = open_session(path, device, threads, self._values)
        except EngineError:
            raise
        except Exception as error:  # onnxruntime raises many classes
            text = f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load the graph: {error}"
            raise _engine_error(text, device) from error
        self._path, self._device = path, device
        self._run_options = run_options(device)
        self.bindings = tuple(
            _binding(path, node, is_input)
            for nodes, is_input in ((self._session.get_inputs(), True), (self._session.get_outputs(), False))
            for node in nodes
        )

    def bind(self, profile: int, tensors: Mapping[str, Tensor], stream: Any) -> Any:
        bound = self._session.io_binding()
        for binding in self.bindings:
            tensor = tensors[binding.name]
            bind = bound.bind_input if binding.is_input else bound.bind_output
            element = element_type(binding.dtype)
            bind(binding.name, self._device.memory, 0, element, tensor.shape, tensor.pointer)
        return bound

    def run(self, bound: Any, stream: Any) -> None:
        try:
            self._session.run_with_iobinding(bound, self._run_options)
        except Exception as error:  # onnxruntime raises many classes
            raise _engine_error(f"{self._path}: {error}", self._device) from error

    def interrupt(self) -> None:
        """Let runs fail, the current one after its current node, until `resume`."""
        self._run_options.terminate = True

    def resume(self) -> None:
        self._run_options.terminate = False

    def capture(self, bound: Any, stream: Any) -> DeviceGraph | None:
        if self._device.stream is None:  # the CPU does not support graphs
            return None
        self.run(bound, stream)  # allocates the memory that a run needs
        return self._device.capture(lambda: self.run(bound, stream))


def _engine_error(text: str, device: Device) -> EngineError:
    """Map an ONNX Runtime message to our error class.

    Device loss is detected by asking the device.
    """
    text = " ".join(text.split())
    if any(words in text.lower() for words in ("out of memory", "failed to allocate", "bfc_arena")):
        return DeviceMemoryError(text)
    try:
        device.synchronize()
    except DeviceLostError as lost:
        return DeviceLostError(f"{text} ({lost})")
    except EngineError:  # an error of other work, which the caller that waits for that work gets
        pass
    return EngineError(text)


def _binding(path: Path, node: Any, is_input: bool) -> Binding:
    return Binding(node.name, _numpy_type(path, node), tuple(node.shape), is_input)


def _numpy_type(path: Path, node: Any) -> np.dtype:
    if node.type in LATE_DTYPES:
        return LATE_DTYPES[node.type]()
    if node.type not in DTYPES:
        supported = ", ".join([*DTYPES, *LATE_DTYPES])
        raise EngineError(f"{path}: {node.name} has type {node.type}, supported are {supported}")
    return np.dtype(DTYPES[node.type])
