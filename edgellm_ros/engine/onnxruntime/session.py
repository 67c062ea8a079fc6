# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime sessions: options for a CPU and for a CUDA GPU."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError

CUDA = "CUDAExecutionProvider"
FATAL = 4
FIRST_WITH_OPSET_24 = (1, 24)
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"  # for a model given as bytes
FIRST_WITH_SPIN_DURATION = (1, 28)
# Time that an idle thread spins before it sleeps. Median time of whole plans on 2 cores, settings in turns in
# one process: without other load, with 1 busy process, with 2, and with several busy processes of several
# threads (load average 4.7):
#     sleeping at once  128 ms  168 ms  270 ms  182 ms
#     20 us              94 ms  151 ms  254 ms  214 ms
#     without a limit           254 ms  371 ms
SPIN_US = 20
# Attention kernels that ONNX Runtime may use on a GPU, as bits: flash, memory-efficient, plain. Not cuDNN's,
# whose last bits differ from run to run with the same inputs (ONNX Runtime 1.31, H200, fp16).
ATTENTION_KERNELS = 1 | 2 | 16
CUBLAS_WORKSPACE = ":0:0"  # none


def open_session(
    path: Path, device: Device | None = None, threads: int = 0, initializers: Mapping[str, Any] | None = None
) -> Any:
    """Open an `onnxruntime.InferenceSession` for a device; None = the CPU.

    On a CPU the graph is lowered if it is too new for the library. initializers: values in place of those in
    the file (shared_initializers.py), which must live as long as the session. EngineError if the library
    lacks CUDA.
    """
    import onnxruntime

    options = _session_options(onnxruntime, threads)
    for name, value in (initializers or {}).items():
        options.add_initializer(name, value)
    if device is not None and device.memory == "cuda":
        onnxruntime.set_default_logger_severity(FATAL)  # errors are raised; they are not logged too
        providers = [(CUDA, _cuda_options(onnxruntime, device))]
        # without fallback: an operator that the GPU cannot run is an error
        return onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    if b"DequantizeLinear" in path.read_bytes():  # the graph's weights are in another file
        # By default all weights that are dequantised in a run are dequantised before the first product. With
        # 12 layers of 4 MB in 8 bits, a session took 275 MB, and in this order 92.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    source: str | bytes = str(path)
    if _version(onnxruntime) < FIRST_WITH_OPSET_24:
        from edgellm_ros.engine.onnxruntime.opset23 import lower_to_opset23

        source = lower_to_opset23(path)
        options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_options(device: Device) -> Any:
    """Make the options of a run: on a GPU, a run only queues work."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    # The default. The Python package looks it up in every run, and a missing entry takes it 45 us.
    options.add_run_config_entry("gpu_graph_id", "0")
    if device.memory == "cuda":
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _session_options(onnxruntime: Any, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    # Never 0: then ONNX Runtime also pins its threads to cores, the same cores for every session.
    options.intra_op_num_threads = threads or available_cores()
    bounded = _version(onnxruntime) >= FIRST_WITH_SPIN_DURATION
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(bounded)))
    if bounded:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    # Memory patterns are cached per input shape and would grow with every new prompt length. Measured: no
    # time is lost without them.
    options.enable_mem_pattern = False
    # Products with 4-bit weights are computed in fp32. By default ONNX Runtime rounds their inputs to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    # Without it, on aarch64, products with 4-bit blocks and inputs of 8 bits have one scale for a row of
    # inputs, and not one for each block as on x86-64: an outlier rounds the rest of the row to zero.
    options.add_session_config_entry("mlas.disable_kleidiai", "1")
    options.log_severity_level = 3
    return options


def _cuda_options(onnxruntime: Any, device: Device) -> dict[str, str]:
    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):  # preload_dlls prints missing libraries
            onnxruntime.preload_dlls()
    # cuBLAS reads this when its first handle is made. With a workspace, it puts an allocation, a release and
    # a kernel that adds partial sums for every layer into a recorded decode step: 2.03 instead of 1.97 ms on
    # an H200 (Qwen3-1.7B's shape), and such a graph takes longer to launch (cuda_graph.py).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    # GroupQueryAttention's fast path for one token ignores position_ids: it rotates by the number of cached
    # rows (ONNX Runtime 1.31; head sizes without an XQA kernel, no norms of heads).
    os.environ.setdefault("ORT_DISABLE_FLASH_DECODE", "1")
    if CUDA not in onnxruntime.get_available_providers():
        raise EngineError(
            f"device {device.name!r} needs ONNX Runtime with CUDA, {onnxruntime.__version__} lacks CUDA: "
            "pip uninstall onnxruntime && pip install -r requirements-cuda.txt"
        )
    return {
        "user_compute_stream": str(int(device.stream.handle)),
        "arena_extend_strategy": "kSameAsRequested",  # not the next power of two
        "use_tf32": "0",  # fp32 means fp32
        "sdpa_kernel": str(ATTENTION_KERNELS),
    }


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(onnxruntime: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
