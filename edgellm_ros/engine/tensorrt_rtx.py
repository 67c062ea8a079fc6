# SPDX-License-Identifier: Apache-2.0
"""What TensorRT for RTX does in its own way.

A plan of TensorRT for RTX is built without a GPU, for one or several kinds of GPU. Kernels are compiled when
the plan runs: these are kept in a file, so that later processes start fast. Everything else is the same as in
TensorRT.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.plan_file import listed, write_atomically

if TYPE_CHECKING:
    import tensorrt_rtx as rtx

logger = logging.getLogger(__name__)

PREFIX = "SM"  # of the names of GPUs in ComputeCapability


def supported_gpus(library: Any) -> tuple[str, ...]:
    """Return the GPUs that the module `tensorrt_rtx` supports, such as "sm_89", in ascending order."""
    names = [name for name in library.ComputeCapability.__members__ if name.startswith(PREFIX)]
    numbers = sorted(int(name.removeprefix(PREFIX)) for name in names)
    return tuple(f"sm_{number}" for number in numbers)


def check_gpus(gpus: Sequence[str], library: Any) -> None:
    """Raise EngineError for a GPU that TensorRT for RTX does not support."""
    for gpu in gpus:
        if gpu not in supported_gpus(library):
            raise EngineError(
                f"TensorRT for RTX {library.__version__} does not support {gpu}, only "
                f"{listed(supported_gpus(library))}; other GPUs need TensorRT (pip install tensorrt-cu13)"
            )


def set_targets(config: rtx.IBuilderConfig, gpus: Sequence[str], library: Any) -> None:
    """Build for these GPUs, and so that runs need no memory but ours, as CUDA graphs want.

    EngineError for a GPU that is not supported.
    """
    check_gpus(gpus, library)
    config.num_compute_capabilities = len(gpus)
    for i, gpu in enumerate(gpus):
        capability = getattr(library.ComputeCapability, PREFIX + gpu.removeprefix("sm_"))
        if not config.set_compute_capability(capability, i):
            raise EngineError(f"TensorRT for RTX {library.__version__} refuses {gpu} as a target")
    config.set_flag(library.BuilderFlag.REQUIRE_USER_ALLOCATION)


class CompiledKernels:
    """Kernels that TensorRT for RTX compiled for one plan on one GPU: its runtime cache.

    They are read from a file beside the plan, and written to it after a CUDA graph was captured and when the
    plan is freed or the process ends.
    """

    def __init__(self, engine: rtx.ICudaEngine, plan: Path, gpu: str, library: Any) -> None:
        self.path = plan.with_name(f"{plan.name}.{gpu}.kernels")
        self._strategies = library.DynamicShapesKernelSpecializationStrategy
        self._cache = engine.create_runtime_config().create_runtime_cache()
        if self.path.is_file() and not self._cache.deserialize(self.path.read_bytes()):
            logger.info("%s: of another TensorRT for RTX; kernels are compiled again", self.path)
        weakref.finalize(self, _save, self._cache, self.path)

    def use(self, config: rtx.IRuntimeConfig, lengths_vary: bool) -> None:
        """Use these kernels in execution contexts made with `config`.

        A new shape needs kernels. If few shapes occur, the kernels are compiled at once, so that decode steps
        take the same time from the second on. If sequence lengths vary, generic kernels run while those for
        the shape are compiled in the background.
        """
        config.set_runtime_cache(self._cache)
        config.dynamic_shapes_kernel_specialization_strategy = (
            self._strategies.LAZY if lengths_vary else self._strategies.EAGER
        )

    def save(self) -> None:
        """Write the kernels to the file; only a warning if that fails."""
        _save(self._cache, self.path)


def _save(cache: rtx.IRuntimeCache, path: Path) -> None:
    contents = memoryview(cache.serialize())
    try:
        if not path.is_file() or path.read_bytes() != contents:
            write_atomically(path, contents)
    except OSError as error:
        logger.warning("%s: compiled kernels are not kept: %s", path, error)
