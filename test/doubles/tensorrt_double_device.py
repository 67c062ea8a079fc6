# SPDX-License-Identifier: Apache-2.0
"""`pytest --device tensorrt-double`: the TensorRT backend on an asynchronous device.

test/doubles/tensorrt_double.py replaces TensorRT. The code of `edgellm build` builds a plan when a test
first opens a graph.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from doubles import tensorrt_double
from doubles.deferred_device import DeferredDevice, QueuedKernels
from edgellm_ros.builder.profiles import Profile, Range, make_profiles
from edgellm_ros.builder.tensorrt_plan import PlanOptions, build_plan
from edgellm_ros.engine import tensorrt_backend
from edgellm_ros.engine.onnx_bindings import read_bindings
from edgellm_ros.engine.tensorrt_library import find_plan, plan_path
from edgellm_ros.engine_directory.config import CONFIG_FILE, EngineConfig
from edgellm_ros.kernels import host

ANY_SIZE = Range(1, 1, 4096)


@functools.cache
def open_double() -> DeferredDevice:
    """Return the device; from now on `import tensorrt` in this process imports the double."""
    tensorrt_double.install()
    host_kernels = host.HostKernels
    host.HostKernels = lambda: QueuedKernels(host_kernels())
    tensorrt_backend.find_plan = _find_or_build
    return DeferredDevice("tensorrt")


def _find_or_build(model: Path, arch: str, library: Any) -> Path:
    plan = plan_path(model, arch, library.__version__)
    if model.is_file() and (not plan.is_file() or plan.stat().st_mtime_ns < model.stat().st_mtime_ns):
        contents = build_plan(model, _profiles(model), model.parent / "timing", PlanOptions(), library)
        plan.write_bytes(contents)
    return find_plan(model, arch, library)


def _profiles(model: Path) -> list[Profile]:
    """Return the profiles of the engine directory; for other graphs all sizes."""
    if (model.parent.parent / CONFIG_FILE).is_file():
        return make_profiles(EngineConfig.load(model.parent.parent))[model.parent.name]
    symbols = {dim for binding in read_bindings(model) for dim in binding.shape if isinstance(dim, str)}
    return [dict.fromkeys(symbols, ANY_SIZE)] * 2
