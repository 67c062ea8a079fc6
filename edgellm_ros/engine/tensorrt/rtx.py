# SPDX-License-Identifier: Apache-2.0
"""What TensorRT for RTX does in its own way.

A plan of TensorRT for RTX is built without a GPU, for one or several kinds of GPU. Kernels are compiled when
the plan runs: these are kept in a file, so that later processes start fast. Everything else is the same as in
TensorRT.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from edgellm_ros.atomic_file import write_atomically
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.library import Library, title_of
from edgellm_ros.engine.tensorrt.plan_file import listed

if TYPE_CHECKING:
    import tensorrt as trt
    import tensorrt_rtx as rtx

logger = logging.getLogger(__name__)

PREFIX = "SM"  # of the names of GPUs in ComputeCapability
FP16_ONLY = "sm_75"  # Turing


class RtxLibrary(Protocol):
    """The parts of the module `tensorrt_rtx` that TensorRT does not have."""

    BuilderFlag: type[rtx.BuilderFlag]
    ComputeCapability: type[rtx.ComputeCapability]
    DynamicShapesKernelSpecializationStrategy: type[rtx.DynamicShapesKernelSpecializationStrategy]


def supported_gpus(library: Library) -> tuple[str, ...]:
    """Return the GPUs that TensorRT for RTX supports, such as "sm_89".

    The names are in ascending order.
    """
    members = cast(RtxLibrary, library).ComputeCapability.__members__
    numbers = sorted(int(name.removeprefix(PREFIX)) for name in members if name.startswith(PREFIX))
    return tuple(f"sm_{number}" for number in numbers)


def check_gpus(gpus: Sequence[str], library: Library) -> None:
    """Raise EngineError for a GPU that TensorRT for RTX does not support."""
    for gpu in gpus:
        if gpu not in supported_gpus(library):
            raise EngineError(
                f"{title_of(library)} does not support {gpu}, only {listed(supported_gpus(library))}; "
                "other GPUs need TensorRT (pip install tensorrt-cu13)"
            )


def check_precision(gpus: Sequence[str], precision: str) -> None:
    """Raise ValueError unless the GPUs compute in this precision.

    TensorRT for RTX does not compute in every precision on every GPU.
    """
    if FP16_ONLY in gpus and precision != "fp16":
        raise ValueError(
            f"TensorRT for RTX computes in fp16 only on {FP16_ONLY}, the engine directory is {precision}: "
            f"export with --precision fp16, or leave {FP16_ONLY} out"
        )


def set_targets(config: trt.IBuilderConfig, gpus: Sequence[str], library: Library) -> None:
    """Build for these GPUs, and so that runs need no memory but ours.

    CUDA graphs want such runs. EngineError for a GPU that is not supported.
    """
    check_gpus(gpus, library)
    rtx_config, rtx_library = cast("rtx.IBuilderConfig", config), cast(RtxLibrary, library)
    rtx_config.num_compute_capabilities = len(gpus)
    for i, gpu in enumerate(gpus):
        capability = rtx_library.ComputeCapability.__members__[PREFIX + gpu.removeprefix("sm_")]
        if not rtx_config.set_compute_capability(capability, i):
            raise EngineError(f"{title_of(library)} refuses {gpu} as a target")
    rtx_config.set_flag(rtx_library.BuilderFlag.REQUIRE_USER_ALLOCATION)


class CompiledKernels:
    """Kernels that TensorRT for RTX compiled for one plan on one GPU.

    The kernels are the library's runtime cache. The cache is read from a file beside the plan, and written to
    it in the run after a CUDA graph was captured, and when the plan is freed or the process ends.
    """

    def __init__(self, engine: trt.ICudaEngine, plan: Path, device: Device, library: Library) -> None:
        self.path = plan.with_name(f"{plan.name}.{device.arch}.kernels")
        self._strategies = cast(RtxLibrary, library).DynamicShapesKernelSpecializationStrategy
        self._cache = cast("rtx.ICudaEngine", engine).create_runtime_config().create_runtime_cache()
        if self.path.is_file() and not self._cache.deserialize(self.path.read_bytes()):
            logger.info("%s: of another %s; kernels are compiled again", self.path, title_of(library))
        # The arguments live until they are saved: the engine too, whose kernels these are.
        self.save = functools.partial(_save, self._cache, self.path, device, engine)
        weakref.finalize(self, self.save)

    def use(self, config: trt.IRuntimeConfig, lengths_vary: bool) -> None:
        """Use these kernels in execution contexts made with `config`.

        A new shape needs kernels. If few shapes occur, the kernels are compiled at once, so that decode steps
        take the same time from the second on. If sequence lengths vary, generic kernels run while those for
        the shape are compiled in the background.
        """
        rtx_config = cast("rtx.IRuntimeConfig", config)
        rtx_config.set_runtime_cache(self._cache)
        rtx_config.dynamic_shapes_kernel_specialization_strategy = (
            self._strategies.LAZY if lengths_vary else self._strategies.EAGER
        )


def _save(cache: rtx.IRuntimeCache, path: Path, device: Device, engine: trt.ICudaEngine) -> None:
    """Write the kernels to the file; only a warning if that fails."""
    device.activate()  # the library needs a current CUDA context, also in a thread that never used the GPU
    memory = cache.serialize()
    if memory is None:
        logger.warning("%s: compiled kernels are not kept: the library does not serialise them", path)
        return
    contents = memoryview(memory).cast("B")  # of floats, says the library: not comparable
    try:
        if not path.is_file() or path.read_bytes() != contents:
            write_atomically(path, contents)
    except OSError as error:
        logger.warning("%s: compiled kernels are not kept: %s", path, error)
