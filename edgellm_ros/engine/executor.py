# SPDX-License-Identifier: Apache-2.0
"""EngineExecutor: bind tensors to one engine and run it.

Thin on purpose: `prepare` checks and binds, `execute` runs, `capture_graph` records a run for replay.
Bindings are cached: a decode step with the same tensors as the previous step costs one comparison; a step
that alternates with other bindings (adapters) costs one look-up.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.engine.backend import (
    SELECTORS,
    Binding,
    EngineBackend,
    InterruptibleBackend,
    PlannedBackend,
)
from edgellm_ros.engine.device import Device, DeviceGraph
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.graph_recorder import GraphRecorder
from edgellm_ros.engine.tensor import Shape, Tensor

logger = logging.getLogger(__name__)

BACKENDS = ("onnxruntime", "tensorrt")
# A new binding of 117 tensors took 340 us, a cached one 10 us. Shapes vary without end, such as lengths of
# prompts, so the oldest binding is dropped, unless the caller has captured or keeps a graph of it.
KEPT_BINDINGS = 16


@dataclass(frozen=True)
class BindingSnapshot:
    """The tensors of a binding; equal snapshots share a binding and its graph."""

    profile: int  # optimization profile
    bindings: tuple[tuple[int, Shape, np.dtype], ...]  # address, shape and type, in the engine's order


@dataclass(frozen=True)
class BoundRun:
    """A run of an engine with a binding; runs with equal snapshots are equal."""

    snapshot: BindingSnapshot
    bound: Any = field(compare=False)  # the owner of a recorded run keeps this as long as the record


@dataclass(eq=False)
class _KeptBinding:
    bound: Any  # what the backend's `bind` returned
    runs: int = 0  # without a graph
    graph: DeviceGraph | None = None  # a recorded run
    is_kept: bool = False  # by the caller, with a graph: lives as long as the executor


class EngineExecutor:
    """Execute one engine. `name` identifies the engine in errors.

    A graph input and output may be bound to the same memory (a KV cache updated in place).
    """

    def __init__(self, backend: EngineBackend, name: str) -> None:
        self.name = name
        self.bindings = {binding.name: binding for binding in backend.bindings}
        self.supports_empty_tensors = backend.supports_empty_tensors
        self._backend = backend
        self._snapshot: BindingSnapshot | None = None
        self._tensors: tuple[Tensor, ...] = ()  # of the current binding, in the engine's order
        self._current: _KeptBinding | None = None  # the binding of `_snapshot`
        self._kept: OrderedDict[BindingSnapshot, _KeptBinding] = OrderedDict()  # the latest one last
        self._recorder = GraphRecorder()
        self._observer: Callable[[Mapping[str, Tensor]], None] | None = None

    def observe(self, observer: Callable[[Mapping[str, Tensor]], None] | None) -> None:
        """Call a function with the tensors of each run before it, by name; None ends this."""
        self._observer = observer

    @property
    def is_observed(self) -> bool:
        """Whether a function wants the tensors of each run, which replays do not call."""
        return self._observer is not None

    @property
    def bound_run(self) -> BoundRun:
        """The run of the current binding. EngineError before a successful `prepare`."""
        if self._snapshot is None or self._current is None:
            raise EngineError(f"{self.name}: no run without a successful prepare")
        return BoundRun(self._snapshot, self._current.bound)

    @classmethod
    def open(
        cls,
        path: str | Path,
        device: Device,
        threads: int = 0,
        backend: str = "",
        forms: Sequence[str] = (),
        shared: Mapping[str, Tensor] | None = None,
    ) -> EngineExecutor:
        """Load `model.onnx`, or the variant in the same folder that the backend needs.

        - threads: of the CPU, 0 = one per core
        - backend: one of BACKENDS, "" = the device's default
        - forms: of variants, the first one counts that there is: "chain" for `model.chain.cuda.onnx`
        - shared: weights on the device that ONNX Runtime uses in place, by name of the initializer

        FileNotFoundError, EngineError; ValueError for an unknown backend.
        """
        path = Path(path)
        backend = backend or ("tensorrt" if device.name == "tensorrt" else "onnxruntime")
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
        if backend == "tensorrt":
            from edgellm_ros.engine.tensorrt.backend import TensorRTBackend

            tensorrt = TensorRTBackend(path, device)
            return cls(tensorrt, f"{path.parent.name}/{tensorrt.path.name}")
        from edgellm_ros.engine.onnxruntime.backend import OnnxRuntimeBackend

        endings = [f".{form}.{device.memory}" for form in forms] + [f".{device.memory}"]  # model.cuda.onnx
        variants = (path.with_suffix(f"{ending}{path.suffix}") for ending in endings)
        path = next((variant for variant in variants if variant.is_file()), path)
        return cls(OnnxRuntimeBackend(path, device, threads, shared), f"{path.parent.name}/{path.name}")

    def dtype(self, name: str) -> np.dtype:
        """Return the element type of a binding. EngineError for an unknown name."""
        if name not in self.bindings:
            raise EngineError(f"{self.name}: no binding {name!r}, only {', '.join(self.bindings)}")
        return self.bindings[name].dtype

    def prepare(
        self, profile: int, dims: Mapping[str, int], tensors: Mapping[str, Tensor], stream: Any = None
    ) -> None:
        """Check tensors against the engine's bindings, and bind them.

        `dims`: values of the symbols in shapes; `tensors`: exactly the engine's inputs and outputs, by name.
        EngineError names the binding that is missing, unknown or of another type or shape; then nothing is
        bound.
        """
        names = self.bindings
        try:
            given = tuple(map(tensors.__getitem__, names))
        except KeyError:
            given = ()
        complete = len(given) == len(names) == len(tensors)
        current = self._snapshot
        if complete and current is not None and current.profile == profile and given == self._tensors:
            return  # the same objects: tensors never change
        snapshot = BindingSnapshot(profile, tuple((t.pointer, t.shape, t.dtype) for t in given))
        if complete and snapshot == current:
            self._tensors = given
            return
        self._snapshot = self._current = None
        self._tensors = ()
        kept = self._kept.get(snapshot) if complete else None
        if kept is None:
            self._check(dims, tensors)
            kept = self._kept[snapshot] = _KeptBinding(self._backend.bind(profile, tensors, stream))
            self._drop_oldest()
        else:
            self._kept.move_to_end(snapshot)
        self._snapshot, self._current, self._tensors = snapshot, kept, given

    def execute(self, stream: Any = None) -> None:
        """Replay the graph captured for the current binding, or else run the engine.

        EngineError before `prepare` or on failure.
        """
        if self._current is None:
            raise EngineError(f"{self.name}: execute without a successful prepare")
        if self._observer is not None:
            self._observer(dict(zip(self.bindings, self._tensors, strict=True)))
        if self._current.graph is not None:
            self._current.graph.launch(stream)
        else:
            self._backend.run(self._current.bound, stream)
            self._current.runs += 1

    def interrupt(self) -> None:
        """Let runs fail soon, from any thread, until `resume`.

        The current run ends after the operator that it computes. Without effect if the library of the engine
        cannot end a run.
        """
        if isinstance(self._backend, InterruptibleBackend):
            self._backend.interrupt()

    def resume(self) -> None:
        """Undo `interrupt`."""
        if isinstance(self._backend, InterruptibleBackend):
            self._backend.resume()

    def capture_graph(self, stream: Any = None) -> bool:
        """Record a run as a graph that `execute` replays for the current binding.

        The graph lives as long as the executor, however many bindings follow. False if the backend does not
        support graphs. EngineError if the run cannot be recorded.
        """
        if self._current is None:
            raise EngineError(f"{self.name}: capture_graph without a successful prepare")
        graph = self._backend.capture(self._current.bound, stream)
        if graph is not None:
            self._current.graph, self._current.is_kept = graph, True
        return graph is not None

    def record(self, stream: Any = None, runs: str = "") -> None:
        """Capture a graph of the current binding, best effort.

        The graph is dropped with its binding, after KEPT_BINDINGS other ones. The engine must have been
        executed with the binding. Does nothing if already captured. Logs the first failure and stops trying.
        runs: what the log calls such runs, if they are some of the engine's.
        """
        current = self._current
        if not self._recorder.active or current is None or current.graph is not None:
            return
        current.graph = self._recorder.capture(
            lambda: self._backend.capture(current.bound, stream),
            lambda reason: logger.warning(
                "%s %s without graphs: %s", self.name, f"executes {runs}" if runs else "runs", reason
            ),
        )

    def record_repeated(self, stream: Any = None) -> None:
        """`record` the current binding if it has been executed at least twice."""
        if self._current is not None and self._current.runs > 1:
            self.record(stream)

    def keep_graph(self) -> None:
        """Keep a recorded graph of the current binding as long as the executor."""
        if self._current is not None:
            self._current.is_kept = self._current.graph is not None

    @property
    def is_plan(self) -> bool:
        """Whether it is a plan of TensorRT: each recorded run takes memory of its own."""
        return isinstance(self._backend, PlannedBackend)

    def stop_recording(self) -> None:
        """Let `record` capture no graphs from now on."""
        self._recorder.active = False

    @property
    def required_context_memory_size(self) -> int:
        """Bytes that a run needs for intermediate results.

        0 if the library of the engine allocates this memory itself, as ONNX Runtime does.
        """
        return self._backend.context_memory_size if isinstance(self._backend, PlannedBackend) else 0

    def set_context_memory(self, memory: Tensor) -> None:
        """Let all later runs use this memory for intermediate results.

        The memory may be shared by executors that run one after another on one stream. Graphs that were
        captured before keep their memory. EngineError if it is smaller than `required_context_memory_size` or
        not aligned, or if the library of the engine allocates this memory itself.
        """
        if not isinstance(self._backend, PlannedBackend):
            raise EngineError(
                f"{self.name}: takes no context memory: its library allocates memory for intermediate results"
            )
        self._backend.set_context_memory(memory)

    def get_profile_shape(self, name: str, profile: int, selector: str) -> Shape:
        """Return the shape of an input in an optimization profile.

        selector: "min", "opt" or "max": smallest, tuned and largest shape. ValueError for another one;
        EngineError for an unknown input or profile, or if the engine has no profiles.
        """
        if selector not in SELECTORS:
            raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {quoted(selector)}")
        binding = self.bindings.get(name)
        if binding is None or not binding.is_input:
            inputs = ", ".join(each.name for each in self.bindings.values() if each.is_input)
            raise EngineError(f"{self.name}: no input {quoted(name)}, only {inputs}")
        if not isinstance(self._backend, PlannedBackend):
            raise EngineError(f"{self.name}: has no optimization profiles: only TensorRT's plans have them")
        return self._backend.profile_shape(name, profile, selector)

    def _drop_oldest(self) -> None:
        """Drop the oldest binding, if there are too many that the caller does not keep."""
        droppable = [snapshot for snapshot, kept in self._kept.items() if not kept.is_kept]
        if len(droppable) > KEPT_BINDINGS:
            del self._kept[droppable[0]]

    def _check(self, dims: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        missing = [name for name in self.bindings if name not in tensors]
        unknown = [name for name in tensors if name not in self.bindings]
        if missing or unknown:
            problems = [f"{name!r} is not bound" for name in missing] + [
                f"unknown binding {name!r}" for name in unknown
            ]
            raise EngineError(f"{self.name}: {', '.join(problems)}")
        for name, binding in self.bindings.items():
            tensor = tensors[name]
            if tensor.dtype != binding.dtype:
                raise EngineError(f"{self.name}: {name} must be {binding.dtype}, got {tensor.dtype}")
            expected = self._resolve(binding, dims)
            if tensor.shape != expected:
                symbols = ", ".join(str(dim) for dim in binding.shape)
                raise EngineError(
                    f"{self.name}: {name} [{symbols}] must be {list(expected)}, got {list(tensor.shape)}"
                )

    def _resolve(self, binding: Binding, dims: Mapping[str, int]) -> Shape:
        try:
            return tuple(dim if isinstance(dim, int) else dims[dim] for dim in binding.shape)
        except KeyError as error:
            raise EngineError(
                f"{self.name}: no value for dimension {error} of {binding.name}; "
                f"there are values for {dict(dims)}"
            ) from None
