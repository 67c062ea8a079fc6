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
from edgellm_ros.builder.profiles import make_profiles
from edgellm_ros.builder.tensorrt_plan import PlanOptions, build_plan
from edgellm_ros.engine import tensorrt_backend
from edgellm_ros.engine.onnx_bindings import read_bindings
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine.plan_choice import choose_plan
from edgellm_ros.engine.plan_file import TENSORRT, plan_path
from edgellm_ros.engine_directory.config import CONFIG_FILE, EngineConfig
from edgellm_ros.kernels import host

ANY_SIZE = Range(1, 1, 4096)


@functools.cache
def open_double() -> DeferredDevice:
    """Return the device; from now on `import tensorrt` in this process imports the double."""
    tensorrt_double.install()
    host_kernels = host.HostKernels
    host.HostKernels = lambda: QueuedKernels(host_kernels())
    tensorrt_backend.choose_plan = _choose_or_build
    return DeferredDevice("tensorrt")


def _choose_or_build(model: Path, device: Any) -> Any:
    path = plan_path(model, [device.arch], TENSORRT, tensorrt_double.__version__)
    if model.is_file() and (not path.is_file() or path.stat().st_mtime_ns < model.stat().st_mtime_ns):
        build_plan(model, _profiles(model), PlanOptions(), tensorrt_double, [device.arch])
    return choose_plan(model, device)


def _profiles(model: Path) -> list[Profile]:
    """Return the profiles of the engine directory; for other graphs all sizes."""
    if (model.parent.parent / CONFIG_FILE).is_file():
        return make_profiles(EngineConfig.load(model.parent.parent))[model.parent.name]
    symbols = {dim for binding in read_bindings(model) for dim in binding.shape if isinstance(dim, str)}
    return [Profile("any", dict.fromkeys(symbols, ANY_SIZE))] * 2
