# SPDX-License-Identifier: Apache-2.0
"""A double of `tensorrt`: ONNX Runtime on the CPU, with TensorRT's rules.

A documented error of TensorRT is an error of the double: logged, and the call returns False or None.
The device is test/doubles/deferred_device.py, so an enqueued run happens when the caller waits. Names and
arguments of everything public are those of the real bindings; arguments of a wrong type are refused as
pybind11 refuses them. test/engine/test_tensorrt_double_against_tensorrt.py compares parsing and building with
TensorRT for RTX.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from doubles import deferred_device
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.onnxruntime.backend import OnnxRuntimeBackend
from edgellm_ros.engine.tensor import Tensor

__name__ = "tensorrt"  # as our code knows it
VERSION = (11, 4, 0, 106)
__version__ = ".".join(map(str, VERSION))
MAGIC = b"ftrt"
HEADER_BYTES = 28  # of a plan: magic at 0, size of the plan at 16, version at 24
SMALLEST_PLAN = 64
LARGEST_RANK = 8
MATMUL_WORKSPACE = 8 << 20  # that a matrix product needs
ALIGNMENT = 256
SCRATCH_JUNK = 0xCD


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class DataType(enum.Enum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4, FP4, E8M0 = range(12)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class BuilderFlag(enum.Enum):
    TF32, VERSION_COMPATIBLE = 6, 12


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class LayerType(enum.Enum):
    ATTENTION_OUTPUT, SHUFFLE = 52, 13


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 0


class Dims(tuple):
    """Sizes of the dimensions, -1 for variable ones."""


TYPES = {
    np.dtype(np.float32): DataType.FLOAT,
    np.dtype(np.float16): DataType.HALF,
    np.dtype(np.int32): DataType.INT32,
    np.dtype(np.int64): DataType.INT64,
    np.dtype(np.uint8): DataType.UINT8,
    np.dtype(np.bool_): DataType.BOOL,
}
FITS: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: isinstance(value, int | np.integer),
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    bytes: lambda value: bool(memoryview(value).nbytes >= 0),
    Dims: lambda value: (
        isinstance(value, tuple | list)
        and len(value) <= LARGEST_RANK
        and all(isinstance(size, int | np.integer) for size in value)
    ),
}


def typed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse arguments that are not of the annotated types."""

    @functools.cache  # at the first call: types may be annotated that are defined below
    def types() -> dict[str, Callable[[Any], bool]]:
        hints = typing.get_type_hints(method)
        return {name: FITS.get(kind, functools.partial(_is_instance, kind)) for name, kind in hints.items()}

    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        for name, value in given.items():
            if name != "self" and name in types() and not types()[name](value):
                raise TypeError(f"{method.__qualname__}(): incompatible function arguments: {name}={value!r}")
        return method(*arguments, **keywords)

    return checked


def _is_instance(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None:
        self._made = True

    def __init_subclass__(cls) -> None:
        init = cls.__init__

        @functools.wraps(init)
        def checked(self: ILogger, *arguments: Any, **keywords: Any) -> None:
            init(self, *arguments, **keywords)
            if not hasattr(self, "_made"):
                raise TypeError("ILogger.__init__() must be called when overriding __init__")

        cls.__init__ = checked

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IHostMemory(np.ndarray):
    """Bytes, with `nbytes`, whose memoryview is unequal to the same `bytes`.

    The real one's says that it holds floats of one byte, and raises struct.error when it is compared.
    """

    def __new__(cls, contents: bytes) -> IHostMemory:
        return np.ndarray.__new__(cls, len(contents), "V1", contents)

    def __bool__(self) -> bool:
        return True


# --- loading and running ----------------------------------------------------------------------------------


class Runtime:
    engine_host_code_allowed: bool

    @typed
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False

    @typed
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        plan = bytes(serialized_engine)
        if not self._is_plan(plan, MAGIC):
            return None
        made_by = tuple(plan[24:HEADER_BYTES])
        content = json.loads(plan[HEADER_BYTES:])
        if made_by != VERSION and not content["version_compatible"]:
            return self._refuse(
                "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is not "
                f"compatible with this version of TensorRT, expecting library version {__version__} got "
                f"{'.'.join(map(str, made_by))}, please rebuild.)"
            )
        if content["version_compatible"] and not self.engine_host_code_allowed:
            return self._refuse(
                "IRuntime::deserializeCudaEngine: Error Code 3: API Usage Error (Cannot deserialize engine "
                "with lean runtime since IRuntime::getEngineHostCodeAllowed() is false.)"
            )
        if content["arch"] != "host":
            return self._refuse(
                "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is "
                f"generated on an incompatible device, expecting compute {content['arch']} got compute host, "
                "please rebuild.)"
            )
        return ICudaEngine(content, self._logger)

    def _is_plan(self, plan: bytes, magic: bytes) -> bool:
        if not plan:
            problem = "API Usage Error (Cannot deserialize with an empty memory buffer.)"
        elif len(plan) < SMALLEST_PLAN:
            problem = "Internal Error (Assertion bufferSize >= minBufferSize failed. )"
        elif plan[:4] != magic:
            problem = (
                "Serialization (Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.Trying "
                "to load an engine created with incompatible serialization version)"
            )
        elif int.from_bytes(plan[16:24], "little") != len(plan):
            problem = "Serialization (Serialization assertion plan.header.size == blobSize failed.)"
        else:
            return True
        self._refuse(f"IRuntime::deserializeCudaEngine: Error Code 1: {problem}")
        return False

    def _refuse(self, message: str) -> None:
        self._logger.log(ILogger.Severity.ERROR, message)


class ICudaEngine:
    device_memory_size_v2: int

    def __init__(self, content: dict[str, Any], logger: ILogger) -> None:
        self._logger = logger
        self._profiles: list[dict[str, list[list[int]]]] = content["profiles"]
        self._aliases: dict[str, str] = content["aliases"]
        self._backend = OnnxRuntimeBackend(Path(content["model"]), CpuDevice())
        self._bindings = {binding.name: binding for binding in self._backend.bindings}
        self._output_shapes: dict[Any, dict[str, tuple[int, ...]]] = {}
        self.device_memory_size_v2 = 1000 + 512 * len(self._bindings)

    @property
    def num_io_tensors(self) -> int:
        return len(self._bindings)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    @typed
    def get_tensor_name(self, index: int) -> str:
        return sorted(self._bindings)[index]  # not in the graph's order: nothing may rely on that

    @typed
    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(dim if isinstance(dim, int) else -1 for dim in self._bindings[name].shape)

    @typed
    def get_tensor_dtype(self, name: str) -> DataType:
        return TYPES[self._bindings[name].dtype]

    @typed
    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self._bindings[name].is_input else TensorIOMode.OUTPUT

    @typed
    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    @typed
    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._aliases.get(name)

    @typed
    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [Dims(shape) for shape in self._profiles[profile_index][name]]

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    @typed
    def create_execution_context(self, runtime_config: IRuntimeConfig | None = None) -> IExecutionContext:
        return IExecutionContext(self, runtime_config or IRuntimeConfig())

    def _shapes(self, inputs: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors.

        A trial run gives the shapes whose symbols no input has.
        """
        key = tuple(sorted(inputs.items()))
        if key in self._output_shapes:
            return self._output_shapes[key]
        symbols: dict[str, int] = {}
        for name, shape in inputs.items():
            for dim, size in zip(self._bindings[name].shape, shape, strict=True):
                if symbols.setdefault(dim, size) != size and not isinstance(dim, int):
                    raise RuntimeError(f"{name}: dimension {dim} is {size}, elsewhere {symbols[dim]}")
        shapes = dict(inputs)
        outputs = [binding for binding in self._bindings.values() if not binding.is_input]
        if all(isinstance(dim, int) or dim in symbols for binding in outputs for dim in binding.shape):
            for binding in outputs:
                shapes[binding.name] = tuple(
                    dim if isinstance(dim, int) else symbols[dim] for dim in binding.shape
                )
        else:
            zeros = {name: np.zeros(shape, self._bindings[name].dtype) for name, shape in inputs.items()}
            names = [binding.name for binding in outputs]
            results = self._backend._session.run(names, zeros)
            shapes |= {name: result.shape for name, result in zip(names, results, strict=True)}
        self._output_shapes[key] = shapes
        return shapes


class IRuntimeConfig:
    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC

    @typed
    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._strategy = strategy


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig) -> None:
        self._engine = engine
        self._strategy = config._strategy
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, 0)
        self._settled = False  # enqueued since its shapes changed
        self._in_a_graph = False

    @typed
    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            return self._fail(f"profileIndex {profile_index} is out of range")
        if stream_handle not in deferred_device.devices:
            return self._fail(f"{stream_handle:#x} is no stream")
        if not self._may_change():
            return False
        self._profile, self._shapes, self._addresses = profile_index, {}, {}
        return True

    @typed
    def set_device_memory(self, memory: int, size: int) -> None:
        if self._strategy != ExecutionContextAllocationStrategy.USER_MANAGED:
            self._fail("the context manages its memory itself")
        elif memory % ALIGNMENT:
            self._fail(f"device memory {memory:#x} is not aligned to {ALIGNMENT} bytes")
        elif size < self._engine.device_memory_size_v2:
            self._fail(f"device memory of {size} bytes, {self._engine.device_memory_size_v2} are needed")
        elif self._may_change():
            self._memory = (memory, size)

    @typed
    def set_input_shape(self, name: str, shape: Dims) -> bool:
        binding = self._engine._bindings.get(name)
        if binding is None or not binding.is_input:
            return self._fail(f"{name} is no input")
        if len(shape) != len(binding.shape):
            return self._fail(f"{name} has {len(binding.shape)} dimensions, not {len(shape)}")
        low, _, high = self._engine._profiles[self._profile].get(name, (binding.shape,) * 3)
        if any(not a <= size <= b for size, a, b in zip(shape, low, high, strict=True)):
            return self._fail(
                f"Error Code 3: API Usage Error ({name} {list(shape)} is outside the range of profile "
                f"{self._profile})"
            )
        if not self._may_change():
            return False
        self._settled = self._settled and self._shapes.get(name) == tuple(shape)
        self._shapes[name] = tuple(shape)
        return True

    @typed
    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._bindings:
            return self._fail(f"{name} is neither input nor output")
        if memory % ALIGNMENT:
            return self._fail(f"{name}: address {memory:#x} is not aligned to {ALIGNMENT} bytes")
        if not self._may_change():
            return False
        self._addresses[name] = memory
        return True

    @typed
    def infer_shapes(self) -> list[str]:
        return [name for name, b in self._engine._bindings.items() if b.is_input and name not in self._shapes]

    @typed
    def get_tensor_shape(self, name: str) -> Dims:
        if self.infer_shapes():
            return self._engine.get_tensor_shape(name)
        return Dims(self._engine._shapes(self._shapes)[name])

    @typed
    def execute_async_v3(self, stream_handle: int) -> bool:
        device = deferred_device.devices.get(stream_handle)
        if device is None:
            return self._fail(f"{stream_handle:#x} is no stream")
        problem = self._problem(device)
        if problem:
            return self._fail(f"IExecutionContext::enqueueV3: Error Code 3: API Usage Error ({problem})")
        self._settled = True
        self._in_a_graph = self._in_a_graph or device.capturing
        scratch = device.buffer_at(*self._memory)
        start = self._memory[0] - scratch.pointer
        tensors = {}
        for name, shape in self._tensors().items():
            dtype, address = self._engine._bindings[name].dtype, self._addresses[name]
            tensors[name] = Tensor(address, shape, dtype, device.buffer_at(address, _nbytes(shape, dtype)))
        device.queue(
            functools.partial(_execute, self._engine, tensors, scratch.bytes[start : start + self._memory[1]])
        )
        return True

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        return self._engine._shapes(self._shapes)

    def _problem(self, device: deferred_device.DeferredDevice) -> str | None:
        engine = self._engine
        unspecified = self.infer_shapes()
        if unspecified:
            return f"input shapes of {', '.join(unspecified)} are not set"
        if device.capturing and not self._settled:
            return "shapes changed since the last enqueue: not possible while a graph is captured"
        for name, shape in self._tensors().items():
            if not self._addresses.get(name):
                return f"address is not set for {name}"
            nbytes = _nbytes(shape, engine._bindings[name].dtype)
            if device.buffer_at(self._addresses[name], nbytes) is None:
                return f"{name} at {self._addresses[name]:#x} is no memory of {nbytes} bytes"
        for output, source in engine._aliases.items():
            if self._addresses[output] != self._addresses[source]:
                return f"{output} is aliased with {source}, and must be bound to its address"
        if device.buffer_at(*self._memory) is None:
            return f"device memory {self._memory} is not set"
        return None

    def _may_change(self) -> bool:
        if self._in_a_graph:
            return self._fail("the context was captured in a graph: changing it makes the graph undefined")
        return True

    def _fail(self, message: str) -> bool:
        self._engine._logger.log(ILogger.Severity.ERROR, message)
        return False


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _execute(engine: ICudaEngine, tensors: dict[str, Tensor], scratch: np.ndarray) -> None:
    """Run an enqueued execution: overwrite the intermediate memory, then compute."""
    scratch[:] = SCRATCH_JUNK
    engine._backend.run(engine._backend.bind(0, tensors, None), None)


# --- building ---------------------------------------------------------------------------------------------


class Builder:
    _magic, _version = MAGIC, VERSION
    _number_of_flags = 3  # of networks

    @typed
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    @typed
    def create_network(self, flags: int = 0) -> INetworkDefinition | None:
        if not 0 <= flags < 1 << self._number_of_flags:
            return _fail(self._logger, "flagSet.toU32() < (1U << EnumMax<NetworkDefinitionCreationFlag>())")
        return INetworkDefinition(flags, self._logger)

    @typed
    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self._logger)

    @typed
    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile(self._logger)

    @typed
    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> IHostMemory | None:
        problem = _network_problem(network, config)
        if problem:
            return _fail(self._logger, problem)
        content = json.dumps(self._content(network, config)).encode()
        if config._timing_cache is not None:
            config._timing_cache._content += network._path.parent.name.encode()
        size = (HEADER_BYTES + len(content)).to_bytes(8, "little")
        return IHostMemory(self._magic + bytes(12) + size + bytes(self._version) + content)

    def _content(self, network: INetworkDefinition, config: IBuilderConfig) -> dict[str, Any]:
        return {
            "model": str(network._path),
            "arch": "host",
            "version_compatible": BuilderFlag.VERSION_COMPATIBLE in config._flags,
            "profiles": [profile._shapes for profile in config._profiles],
            "aliases": network._aliases,
        }


def _fail(logger: ILogger, problem: str) -> None:
    logger.log(ILogger.Severity.ERROR, f"Error Code 4: API Usage Error ({problem})")


def _network_problem(network: INetworkDefinition, config: IBuilderConfig) -> str | None:
    workspace = config._pools.get(MemoryPoolType.WORKSPACE)
    if workspace == 0 or ("MatMul" in network._operators and workspace and workspace < MATMUL_WORKSPACE):
        return "no tactics to implement the operation within workspace limit"
    for layer in network._layers:
        # The double has no fused kernels. TensorRT has some, for fp16.
        if layer.type == LayerType.ATTENTION_OUTPUT and not layer._attention.decomposable:
            return "Attention operation was not supported by a dedicated kernel."
    dynamic = any(-1 in tensor.shape for tensor in network._inputs)
    if dynamic and not config._profiles:
        return "Network has dynamic or shape inputs, but no optimization profile has been defined."
    problems = [network._update_problem, *(_profile_problem(network, p) for p in config._profiles)]
    return next(filter(None, problems), None)


def _profile_problem(network: INetworkDefinition, profile: IOptimizationProfile) -> str | None:
    ranges: dict[str, list[tuple[int, ...]]] = {}  # of symbols: (min, opt, max) in each place
    for tensor, dims in zip(network._inputs, network._dims, strict=True):
        if tensor.name not in profile._shapes:
            if -1 in tensor.shape:
                return f"Dynamic input tensor {tensor.name} is missing dimensions in the profile"
            continue
        sizes = list(zip(*profile._shapes[tensor.name], strict=True))
        if len(sizes) != len(dims):
            return f"{tensor.name} has {len(dims)} dimensions but the profile has {len(sizes)}"
        for dim, size in zip(dims, sizes, strict=True):
            if isinstance(dim, str):
                ranges.setdefault(dim, []).append(size)
            elif set(size) != {dim}:
                return f"Dimension mismatch for tensor {tensor.name}: profile has {size}, tensor has {dim}"
    for symbol, sizes in ranges.items():
        low, high = max(low for low, _, _ in sizes), min(high for _, _, high in sizes)
        tuned = {tuned for _, tuned, _ in sizes}
        if low > high:
            return f"{symbol}: Input dimensions with this name have contradictory constraints: {sizes}"
        if low < high and (len(tuned) > 1 or not low <= min(tuned) <= high):
            return f"Profile kOPT values are not self-consistent: {symbol} is {tuned}, in {low}..{high}"
    return None


class ITensor:
    name: str
    shape: Dims

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = Dims(shape)


class IAttention:
    decomposable: bool

    def __init__(self) -> None:
        self.decomposable = False


class ILayer:
    type: LayerType

    def __init__(self, operator: str) -> None:
        self.type = LayerType.ATTENTION_OUTPUT if operator == "Attention" else LayerType.SHUFFLE
        self._attention = IAttention()


class IAttentionOutputLayer(ILayer):
    @property
    def attention(self) -> IAttention:
        return self._attention


class INetworkDefinition:
    def __init__(self, flags: int, logger: ILogger) -> None:
        self._flags = flags
        self._logger = logger
        self._layers: list[ILayer] = []
        self._operators: set[str] = set()
        self._inputs: list[ITensor] = []
        self._dims: list[tuple[int | str, ...]] = []
        self._aliases: dict[str, str] = {}
        self._update_problem: str | None = None  # of an update of a cache
        self._path = Path()

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @typed
    def get_layer(self, index: int) -> ILayer | None:
        return self._at(self._layers, index)

    @typed
    def get_input(self, index: int) -> ITensor | None:
        return self._at(self._inputs, index)

    def _at(self, values: list[Any], index: int) -> Any:
        if not 0 <= index < len(values):
            return _fail(self._logger, f"Invalid index: {index}. Valid range is [0, {len(values)})")
        return values[index]

    def _fill(self, graph: ir.Graph) -> None:
        for value in graph.inputs:
            dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
            self._dims.append(dims)
            self._inputs.append(ITensor(value.name, tuple(d if isinstance(d, int) else -1 for d in dims)))
        self._layers = [ILayer(node.op_type) for node in graph]
        self._operators = {node.op_type for node in graph}
        for node in graph:
            if node.op_type == "TensorScatter":
                cache, result = node.inputs[0], node.outputs[0]
                if cache not in graph.inputs:
                    self._update_problem = f"{node.name}: The cache tensor must be a network input."
                elif result not in graph.outputs:
                    self._update_problem = f"{node.name}: The output tensor must be a network output."
                elif cache.name in self._aliases.values():
                    self._update_problem = f"{node.name}: Input index already mapped to an output_index"
                else:
                    self._aliases[result.name] = cache.name


class ParserError:
    def __init__(self, desc: str, node_name: str, node_operator: str) -> None:
        self._values = desc, node_name, node_operator

    @typed
    def desc(self) -> str:
        return self._values[0]

    @typed
    def node_name(self) -> str:
        return self._values[1]

    @typed
    def node_operator(self) -> str:
        return self._values[2]


class OnnxParser:
    @typed
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network
        self._logger = logger
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    @typed
    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    @typed
    def parse_from_file(self, model: str) -> bool:
        network, path = self._network, Path(model).resolve()
        if network._path != Path():
            return self._refuse(ParserError("A model was previously parsed!", "", ""))
        if not path.is_file():
            return self._refuse(ParserError(f"Input file cannot be found: {model}", "", ""))
        try:
            graph = ir.load(path).graph
        except Exception:
            return self._refuse(ParserError("Failed to parse the ONNX model.", "", ""))
        network._path = path
        network._fill(graph)
        # The operator's domain does not matter to the real parser either.
        return self._refuse(
            *(
                ParserError("Plugin not found", node.name, node.op_type)
                for node in graph
                if not onnx.defs.has(node.op_type)
            )
        )

    def _refuse(self, *errors: ParserError) -> bool:
        self._errors = list(errors)
        for error in errors:
            self._logger.log(ILogger.Severity.ERROR, f"{error.node_operator()}: {error.desc()}")
        return not errors


class IOptimizationProfile:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self._shapes: dict[str, list[list[int]]] = {}

    @typed
    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None:
        if any(size < 0 for size in (*min, *opt, *max)):
            _fail(self._logger, f"{input}: sizes must not be negative")
            raise RuntimeError("Shape provided for min, opt or max is inconsistent with other shapes.")
        self._shapes[input] = [list(min), list(opt), list(max)]

    def _is_valid(self) -> bool:
        return all(
            len(low) == len(tuned) == len(high)
            and all(a <= b <= c for a, b, c in zip(low, tuned, high, strict=True))
            for low, tuned, high in self._shapes.values()
        )


class ITimingCache:
    def __init__(self, content: bytes) -> None:
        self._content = content

    @typed
    def serialize(self) -> IHostMemory:
        return IHostMemory(self._content)


class IBuilderConfig:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger
        self._flags = {BuilderFlag.TF32}
        self._profiles: list[IOptimizationProfile] = []
        self._pools: dict[MemoryPoolType, int] = {}
        self._timing_cache: ITimingCache | None = None

    @typed
    def set_flag(self, flag: BuilderFlag) -> None:
        self._flags.add(flag)

    @typed
    def clear_flag(self, flag: BuilderFlag) -> None:
        self._flags.discard(flag)

    @typed
    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self._pools[pool] = pool_size

    @typed
    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        if not profile._is_valid():
            _fail(self._logger, "please ensure that the optimization profiles satisfy MIN<=OPT<=MAX")
            return -1
        self._profiles.append(profile)
        return len(self._profiles) - 1

    @typed
    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(bytes(serialized_timing_cache))

    @typed
    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._timing_cache = cache
        return True

    @typed
    def get_timing_cache(self) -> ITimingCache:
        return self._timing_cache


def install() -> None:
    """Make `import tensorrt` import this module."""
    sys.modules["tensorrt"] = sys.modules["doubles.tensorrt_double"]
