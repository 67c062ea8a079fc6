# SPDX-License-Identifier: Apache-2.0
"""TensorRT, its lean runtime or TensorRT for RTX as an engine backend.

Runs on our buffers. Follows TensorRT's rules, which the test double (test/doubles/tensorrt_double.py)
enforces:

- An execution context has one optimization profile, and a switch resets its shapes. So each profile has its
  own contexts, and no context ever switches.
- We provide the memory for intermediate results. All engines of a device run one after another on its one
  stream, so they share one buffer of the largest size, unless the caller gives other memory.
- Addresses are multiples of 256. Views of larger tensors may have other addresses; they are copied.
- An output that TensorRT updates in place (a KV cache) must have the address of its input.
- After a graph was captured from a context, neither the context may change nor its memory be freed.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_ros.engine.backend import SELECTORS, Binding
from edgellm_ros.engine.device import Device, DeviceGraph
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.onnx_bindings import read_bindings
from edgellm_ros.engine.tensor import Shape, Tensor, bfloat16
from edgellm_ros.engine.tensorrt.context_memory import ALIGNMENT, ContextMemory, aligned
from edgellm_ros.engine.tensorrt.errors import engine_error, plan_error
from edgellm_ros.engine.tensorrt.library import Library, LibraryLog, library_log, start, title_of
from edgellm_ros.engine.tensorrt.plan_choice import choose_plan
from edgellm_ros.engine.tensorrt.plan_file import RTX
from edgellm_ros.engine.tensorrt.rtx import CompiledKernels

if TYPE_CHECKING:
    import tensorrt as trt

KEPT_CONTEXTS = 4  # per profile, for bindings that alternate (adapters); each context needs memory


@dataclass(eq=False)
class Bound:
    """A binding: the tensors for TensorRT, and copies of tensors that are not aligned.

    Keep alive as long as a captured graph: it owns the execution contexts.
    """

    profile: int  # optimization profile
    tensors: dict[str, Tensor]  # by name; all aligned
    inward: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (target, source), copied before a run
    outward: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # copied after a run
    recorded: list[trt.IExecutionContext] = field(default_factory=list)  # in graphs: must not change


class TensorRTBackend:
    """One deserialised plan. `path`: the file of the plan.

    `model`: the graph of the plan. The plan that fits GPU and library is loaded from the graph's folder.
    """

    # TensorRT documents empty tensors, but we use none: an adapter of rank 0 becomes an adapter of zeros.
    supports_empty_tensors = False

    def __init__(self, model: Path, device: Device) -> None:
        library, self._plan = choose_plan(model, device)
        self.path = self._plan.path
        self._device = device
        self._library = library
        self._log: LibraryLog = library_log(library)
        self._engine = self._load(library)
        self._kernels: CompiledKernels | None = None
        if self._plan.library == RTX:
            self._kernels = CompiledKernels(self._engine, self.path, device, library)
        self.bindings = read_bindings(model)
        self._check_bindings(model)
        self._aliases = self._find_aliases()
        self._ranges = [self._profile(i) for i in range(self._engine.num_optimization_profiles)]
        self._contexts: list[OrderedDict[Bound, trt.IExecutionContext]] = [
            OrderedDict() for _ in self._ranges
        ]
        self.context_memory_size: int = self._engine.device_memory_size_v2
        self._memory = ContextMemory.of(device)
        self._memory.reserve(self.context_memory_size)
        self._has_recorded = False  # since the compiled kernels were saved
        self._given: list[Tensor] = []  # memory of the caller in its place; graphs may have recorded it

    def bind(self, profile: int, tensors: Mapping[str, Tensor], stream: Any) -> Bound:
        self._check_profile(profile)
        for name, (low, _, high) in self._ranges[profile].items():
            shape = tensors[name].shape
            if any(not a <= size <= b for size, a, b in zip(shape, low, high, strict=True)):
                raise EngineError(
                    f"{self.path}: {name} {list(shape)} is outside profile {profile}, "
                    f"from {list(low)} to {list(high)}"
                )
        bound = Bound(profile, {})
        for binding in self.bindings:
            self._place(bound, binding, tensors)
        self._context(bound)
        return bound

    def run(self, bound: Bound, stream: Any) -> None:
        context = self._context(bound)
        for target, source in bound.inward:
            self._device.copy(target, source)
        self._log.take()
        if not context.execute_async_v3(int(self._device.stream.handle)):
            raise engine_error(f"{self.path}: TensorRT could not run the plan: {self._log.take()}")
        for target, source in bound.outward:
            self._device.copy(target, source)
        if self._device.capturing and bound in self._contexts[bound.profile]:
            bound.recorded.append(self._contexts[bound.profile].pop(bound))
            self._has_recorded = True
        elif self._has_recorded and self._kernels is not None:
            self._has_recorded = False
            self._kernels.save()

    def capture(self, bound: Bound, stream: Any) -> DeviceGraph | None:
        self.run(bound, stream)  # a change of shapes takes effect in the first run
        graph = self._device.capture(lambda: self.run(bound, stream))
        if self._kernels is not None:
            self._kernels.save()
        return graph

    def profile_shape(self, name: str, profile: int, selector: str) -> Shape:
        """Return an input's shape in a profile, which of a fixed shape is that shape."""
        self._check_profile(profile)
        shapes = self._ranges[profile].get(name)
        if shapes is None:
            return next(tuple(map(int, each.shape)) for each in self.bindings if each.name == name)
        return shapes[SELECTORS.index(selector)]

    def set_context_memory(self, memory: Tensor) -> None:
        """Run in this memory from now on; recorded graphs keep theirs."""
        nbytes = memory.size * memory.dtype.itemsize
        if nbytes < self.context_memory_size:
            raise EngineError(
                f"{self.path}: the context memory must have {self.context_memory_size} bytes, got {nbytes}"
            )
        if memory.pointer % ALIGNMENT:
            raise EngineError(
                f"{self.path}: the context memory at {memory.pointer:#x} must be at a multiple of "
                f"{ALIGNMENT} bytes"
            )
        self._device.synchronize()  # contexts must not be freed while they run
        for contexts in self._contexts:
            contexts.clear()
        self._given.append(memory)

    def _check_profile(self, profile: int) -> None:
        if not 0 <= profile < len(self._ranges):
            raise EngineError(
                f"{self.path}: no optimization profile {profile}, the plan has {len(self._ranges)}"
            )

    def _load(self, library: Library) -> trt.ICudaEngine:
        runtime = start(library, library.Runtime)
        # Only the user decides whether code of a plan runs: the record beside the plan may come from others.
        runtime.engine_host_code_allowed = self._device.allow_plan_code
        self._log.take()
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise plan_error(self._plan, title_of(library), self._device.description, self._log.take())
        return engine

    def _check_bindings(self, model: Path) -> None:
        """Raise EngineError unless plan and graph have the same inputs and outputs.

        The plan may be older than the graph.
        """
        engine, library = self._engine, self._library
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        problem = found.symmetric_difference(binding.name for binding in self.bindings)
        for binding in [] if problem else self.bindings:
            shape = tuple(engine.get_tensor_shape(binding.name))
            is_input = engine.get_tensor_mode(binding.name) == library.TensorIOMode.INPUT
            same = len(shape) == len(binding.shape) and is_input == binding.is_input
            same = same and _numpy_type(library, engine.get_tensor_dtype(binding.name)) == binding.dtype
            pairs = zip(shape, binding.shape, strict=False)
            if not same or any(-1 != size != dim for size, dim in pairs if isinstance(dim, int)):
                problem.add(binding.name)
            if engine.get_tensor_location(binding.name) != library.TensorLocation.DEVICE:
                raise EngineError(
                    f"{self.path}: {binding.name} must be in host memory, which is not supported"
                )
        if engine.num_optimization_profiles != len(self._plan.profiles):
            problem.add("optimization profiles")
        if problem:
            raise EngineError(
                f"{self.path}: made from another graph than {model.name} ({', '.join(sorted(problem))}); "
                f"run `edgellm build {model.parent.parent}` again"
            )

    def _find_aliases(self) -> dict[str, str]:
        """Map each output that is updated in place to its input."""
        outputs = [binding.name for binding in self.bindings if not binding.is_input]
        aliases = {name: self._engine.get_aliased_input_tensor(name) for name in outputs}
        return {name: source for name, source in aliases.items() if source}

    def _profile(self, index: int) -> dict[str, tuple[Shape, Shape, Shape]]:
        """Return smallest, tuned and largest shape of each input whose shape may vary."""
        ranges = {}
        for binding in self.bindings:
            if binding.is_input and any(not isinstance(dim, int) for dim in binding.shape):
                low, tuned, high = self._engine.get_tensor_profile_shape(binding.name, index)
                ranges[binding.name] = tuple(low), tuple(tuned), tuple(high)
        return ranges

    def _place(self, bound: Bound, binding: Binding, tensors: Mapping[str, Tensor]) -> None:
        """Bind a tensor, or an aligned copy of a tensor that is not aligned."""
        name, tensor = binding.name, tensors[binding.name]
        source = self._aliases.get(name)
        if source is not None:
            if tensor.pointer != tensors[source].pointer:
                raise EngineError(
                    f"{self.path}: {name} is written in the memory of {source}: bind both to the same address"
                )
            if tensor.pointer % ALIGNMENT:
                raise EngineError(
                    f"{self.path}: {source} at {tensor.pointer:#x} must be at a multiple of {ALIGNMENT} bytes"
                )
        elif not binding.is_input:
            same = [b.name for b in self.bindings if b.is_input and tensors[b.name].pointer == tensor.pointer]
            if same:
                raise EngineError(
                    f"{self.path}: {name} is not updated in place, but has the address of {same[0]}"
                )
        if tensor.pointer % ALIGNMENT == 0:
            bound.tensors[name] = tensor
            return
        copy = aligned(self._device, tensor)
        bound.tensors[name] = copy
        if binding.is_input:
            bound.inward.append((copy, tensor))
        else:
            bound.outward.append((tensor, copy))

    def _context(self, bound: Bound) -> trt.IExecutionContext:
        """Return a context with the shapes and addresses of a binding.

        If no context has them, a new one gets them, or beyond KEPT_CONTEXTS the least recently used one. All
        runs of a binding in one graph share a context.
        """
        if self._device.capturing and bound.recorded:
            return bound.recorded[-1]
        contexts = self._contexts[bound.profile]
        if bound in contexts:
            contexts.move_to_end(bound)
            return contexts[bound]
        if len(contexts) < KEPT_CONTEXTS:
            context = self._make_context(bound.profile)
        else:
            _, context = contexts.popitem(last=False)
        self._log.take()
        try:
            self._apply(bound, context)
        except RuntimeError as error:  # infer_shapes raises it; EngineError is one too
            raise (
                error if isinstance(error, EngineError) else engine_error(f"{self.path}: {error}")
            ) from error
        contexts[bound] = context
        return context

    def _make_context(self, profile: int) -> trt.IExecutionContext:
        self._log.take()
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if self._kernels is not None:
            self._kernels.use(config, self._plan.profiles[profile].lengths_vary)
        context = self._engine.create_execution_context(config)
        if context is None:
            raise engine_error(f"{self.path}: TensorRT could not make a context: {self._log.take()}")
        if not context.set_optimization_profile_async(profile, int(self._device.stream.handle)):
            raise engine_error(f"{self.path}: profile {profile}: {self._log.take()}")
        if self._given:
            context.set_device_memory(self._given[-1].pointer, self.context_memory_size)
            return context
        address, size = self._memory.window()
        if size:
            context.set_device_memory(address, size)
        return context

    def _apply(self, bound: Bound, context: trt.IExecutionContext) -> None:
        for binding in self.bindings:
            name, tensor = binding.name, bound.tensors[binding.name]
            if binding.is_input and not context.set_input_shape(name, tensor.shape):
                raise engine_error(f"{self.path}: {name} {list(tensor.shape)}: {self._log.take()}")
            if not context.set_tensor_address(name, tensor.pointer):
                raise engine_error(f"{self.path}: {name} at {tensor.pointer:#x}: {self._log.take()}")
        unspecified = context.infer_shapes()
        if unspecified:
            raise EngineError(f"{self.path}: TensorRT lacks the shape of {', '.join(unspecified)}")
        for binding in self.bindings:
            shape = tuple(context.get_tensor_shape(binding.name))
            if shape != bound.tensors[binding.name].shape:
                raise EngineError(
                    f"{self.path}: {binding.name} becomes {list(shape)}, "
                    f"but a tensor {list(bound.tensors[binding.name].shape)} is bound"
                )


def _numpy_type(library: Library, dtype: trt.DataType) -> np.dtype | None:
    """Return the NumPy type of a TensorRT type; None for types that we do not use."""
    types = {
        library.DataType.FLOAT: np.float32,
        library.DataType.HALF: np.float16,
        library.DataType.INT32: np.int32,
        library.DataType.INT64: np.int64,
        library.DataType.UINT8: np.uint8,
        library.DataType.BOOL: np.bool_,
    }
    if dtype == library.DataType.BF16:
        return bfloat16()
    return np.dtype(types[dtype]) if dtype in types else None
