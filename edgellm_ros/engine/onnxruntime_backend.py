# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime as an engine backend: a session that reads and writes our buffers by address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor

FIRST_WITH_OPSET_24 = (1, 24)
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"  # for a model given as bytes
FIRST_WITH_SPIN_DURATION = (1, 28)
# How long a thread looks for its next share of the work before it sleeps. Median of whole plans on 2 cores,
# settings in turns in one process: alone, beside 1 and 2 other processes that never wait, beside several with
# threads of their own (load average 4.7):
#     sleeping at once  128 ms  168 ms  270 ms  182 ms
#     20 us              94 ms  151 ms  254 ms  214 ms
#     without a limit           254 ms  371 ms
SPIN_US = 20
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

    Sequences of a batch do not influence each other's bits, as long as they meet only in these operators
    (found with ONNX Runtime 1.31 on x86-64 for 1 to 8 threads; test/engine/test_batch_invariance.py holds it
    down):

    - MatMul with a constant weight, fp32 or fp16: such weights are packed once, and every row takes the same
    way
      through them, also a single row.
    - Gemm of two activations with transA: no special way for a single row, long sums are cut every 128 terms
      (builder/lora.py).
    - Attention: heads are computed one by one. Two or more queries of a head (prefill) give the same bits
      whatever their number; a single query (decode) takes another way and differs from them in the last bits.

    It does not hold for MatMul of two activations, where a single row and the number of threads and matrices
    change the order of summation: engines that have such products (the action head) are run with shapes that
    follow from one request alone.
    """

    def __init__(self, path: Path, device: Device, threads: int = 0) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise EngineError(f"device {device.name!r} needs the package onnxruntime: {error}") from error
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found")
        try:
            self._session = open_session(path, threads)
        except Exception as error:  # onnxruntime raises many classes of its own
            raise EngineError(
                f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load it: {error}"
            ) from error
        self._path = path
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
            bind(binding.name, "cpu", 0, binding.dtype.type, tensor.shape, tensor.pointer)
        return bound

    def run(self, bound: Any, stream: Any) -> None:
        try:
            self._session.run_with_iobinding(bound)
        except Exception as error:  # onnxruntime raises many classes of its own
            raise EngineError(f"{self._path}: {error}") from error

    def capture(self, bound: Any, stream: Any) -> None:
        return None


def open_session(path: Path, threads: int = 0) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU; the graph is lowered if it is too new for the library."""
    import onnxruntime

    options = _session_options(onnxruntime, threads)
    source: str | bytes = str(path)
    if _version(onnxruntime) < FIRST_WITH_OPSET_24:
        from edgellm_ros.engine.opset23 import lower_to_opset23

        source = lower_to_opset23(path)
        options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _session_options(onnxruntime: Any, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    # A number given explicitly, because with 0 ONNX Runtime also pins its threads to cores, the same ones for
    # every session.
    options.intra_op_num_threads = threads or available_cores()
    bounded = _version(onnxruntime) >= FIRST_WITH_SPIN_DURATION
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(bounded)))
    if bounded:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    # Plans of memory use are kept per input shape and would grow with every new prompt length; no time was
    # lost without.
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    return options


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(onnxruntime: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


def _binding(path: Path, node: Any, is_input: bool) -> Binding:
    if node.type not in DTYPES:
        raise EngineError(f"{path}: {node.name} has type {node.type}, supported are {', '.join(DTYPES)}")
    return Binding(node.name, np.dtype(DTYPES[node.type]), tuple(node.shape), is_input)
