# SPDX-License-Identifier: Apache-2.0
"""A double of `tensorrt_rtx`: that of `tensorrt` with the differences for RTX.

A plan is for named GPUs, a runtime configuration has a cache of compiled kernels and a strategy for dynamic
shapes, and there is neither a timing cache nor a version-compatible plan.
"""

from __future__ import annotations

import enum
import json
from typing import Any

from doubles import tensorrt_double
from doubles.tensorrt_double import (
    HEADER_BYTES,
    DataType,
    ExecutionContextAllocationStrategy,
    IAttentionOutputLayer,
    IHostMemory,
    ILogger,
    INetworkDefinition,
    LayerType,
    MemoryPoolType,
    NetworkDefinitionCreationFlag,
    OnnxParser,
    TensorIOMode,
    TensorLocation,
    typed,
)

__all__ = [
    "DataType",
    "ExecutionContextAllocationStrategy",
    "IAttentionOutputLayer",
    "ILogger",
    "LayerType",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "TensorIOMode",
    "TensorLocation",
]
__name__ = "tensorrt_rtx"  # as our code knows it
VERSION = (1, 7, 1, 116)
__version__ = ".".join(map(str, VERSION))
MAGIC = b"vtrt"


class ComputeCapability(enum.Enum):
    NONE, CURRENT = range(2)
    SM75, SM80, SM86, SM89, SM120, SM121 = 75, 80, 86, 89, 120, 121


class BuilderFlag(enum.Enum):
    TF32, VERSION_COMPATIBLE, REQUIRE_USER_ALLOCATION = 6, 12, 28


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY, EAGER, NONE = range(3)


class IRuntimeCache:
    def __init__(self) -> None:
        self._kernels = b""

    @typed
    def deserialize(self, blob: bytes) -> bool:
        if not bytes(blob).startswith(b"kernels"):
            return False
        self._kernels = bytes(blob)
        return True

    @typed
    def serialize(self) -> IHostMemory:
        return IHostMemory(self._kernels)


class IRuntimeConfig(tensorrt_double.IRuntimeConfig):
    dynamic_shapes_kernel_specialization_strategy: DynamicShapesKernelSpecializationStrategy

    def __init__(self) -> None:
        super().__init__()
        self._cache: IRuntimeCache | None = None
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY

    @typed
    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    @typed
    def set_runtime_cache(self, cache: IRuntimeCache | None = None) -> bool:
        self._cache = cache
        return True


class IExecutionContext(tensorrt_double.IExecutionContext):
    """Compiles kernels for the shapes of a run, which the runtime cache keeps."""

    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        super().__init__(engine, config)
        self._config = config

    @typed
    def execute_async_v3(self, stream_handle: int) -> bool:
        cache = self._config._cache
        kernels = repr(sorted(self._shapes.items())).encode()
        if cache is not None and kernels not in cache._kernels:
            cache._kernels = (cache._kernels or b"kernels") + kernels
        return super().execute_async_v3(stream_handle)


class ICudaEngine(tensorrt_double.ICudaEngine):
    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    @typed
    def create_execution_context(
        self, runtime_config: IRuntimeConfig | None = None
    ) -> IExecutionContext | None:
        config = runtime_config or IRuntimeConfig()
        if config._strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            return self._logger.log(
                ILogger.Severity.ERROR,
                "Engine was built with BuilderFlag::kREQUIRE_USER_ALLOCATION. Execution context creation "
                "requires ExecutionContextAllocationStrategy::kUSER_MANAGED allocation strategy.",
            )
        return IExecutionContext(self, config)


class Runtime(tensorrt_double.Runtime):
    _gpu = "SM89"  # the GPU at hand

    @typed
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        plan = bytes(serialized_engine)
        if not self._is_plan(plan, MAGIC):
            return None
        made_by = tuple(plan[24:HEADER_BYTES])
        if made_by != VERSION:
            return self._refuse(
                f"The engine has been created with TensorRT-RTX version {'.'.join(map(str, made_by))}, "
                f"but the current runtime is TensorRT-RTX version {__version__}."
            )
        content, gpu = json.loads(plan[HEADER_BYTES:]), self._gpu
        if gpu not in content["gpus"]:
            return self._refuse(f"The engine cannot run on this GPU, which has compute capability {gpu}")
        return ICudaEngine(content, self._logger)


class IBuilderConfig(tensorrt_double.IBuilderConfig):
    def __init__(self, logger: ILogger) -> None:
        super().__init__(logger)
        self._flags = {BuilderFlag.TF32}
        self._capabilities: list[ComputeCapability | None] = []

    @property
    def num_compute_capabilities(self) -> int:
        return len(self._capabilities)

    @num_compute_capabilities.setter
    def num_compute_capabilities(self, number: int) -> None:
        if not isinstance(number, int):
            raise TypeError(f"incompatible function arguments: {number!r}")
        if number < 0:
            tensorrt_double._fail(self._logger, "Number of compute capabilities must be non-negative.")
            raise ValueError("Provided number of compute capabilities is incorrect")
        self._capabilities = (self._capabilities + [None] * number)[:number]

    @typed
    def set_flag(self, flag: BuilderFlag) -> None:
        self._flags.add(flag)

    @typed
    def clear_flag(self, flag: BuilderFlag) -> None:
        self._flags.discard(flag)

    @typed
    def set_compute_capability(self, compute_capability: ComputeCapability, index: int) -> bool:
        if not 0 <= index < self.num_compute_capabilities:
            problem = "Index of compute capability is not in a valid range."
        elif compute_capability == ComputeCapability.NONE:
            problem = "Compute capability cannot be kNONE."
        elif compute_capability == ComputeCapability.CURRENT and self.num_compute_capabilities != 1:
            problem = "When set to kCURRENT, the number of compute capabilities must be 1."
        else:
            self._capabilities[index] = compute_capability
            return True
        tensorrt_double._fail(self._logger, problem)
        return False


class Builder(tensorrt_double.Builder):
    _magic, _version = MAGIC, VERSION
    _number_of_flags = 1

    @typed
    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self._logger)

    @typed
    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> IHostMemory | None:
        if BuilderFlag.VERSION_COMPATIBLE in config._flags:
            self._logger.log(
                ILogger.Severity.ERROR,
                "IBuilder::buildSerializedNetwork: Error Code 6: API Usage Error (Unable to load library: "
                "libnvinfer_lean.so.1)",
            )
            return None
        if None in config._capabilities:
            return self._logger.log(ILogger.Severity.ERROR, "Unexpected exception bad optional access")
        return super().build_serialized_network(network, config)

    def _content(self, network: INetworkDefinition, config: IBuilderConfig) -> dict[str, Any]:
        gpus = [capability.name for capability in config._capabilities]
        every = [name for name in ComputeCapability.__members__ if name.startswith("SM")]
        return super()._content(network, config) | {"gpus": gpus or every}
