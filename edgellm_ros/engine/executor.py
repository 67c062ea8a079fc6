# SPDX-License-Identifier: Apache-2.0
"""EngineExecutor: binds tensors to one engine and runs it.

Thin on purpose: `prepare` checks and binds, `execute` runs, `capture_graph` records what is bound for replay.
Work that an earlier `prepare` did already is not repeated: a decode step whose tensors stand where they stood
before costs one comparison, one that takes turns with others (adapters) a look-up.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.engine.backend import Binding, EngineBackend
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.tensor import Shape, Tensor

logger = logging.getLogger(__name__)

BACKENDS = ("onnxruntime", "tensorrt")
KEPT_BINDINGS = 16  # a new binding of 117 tensors took 340 us, one that was kept 10 us


@dataclass(frozen=True)
class BindingSnapshot:
    """Address and shape of every binding, in the engine's order.

    Equal snapshots need no new binding, and may share a graph.
    """

    profile: int
    bindings: tuple[tuple[int, Shape], ...]


class EngineExecutor:
    """Executes one engine. `name` stands in errors.

    A graph input and output may be bound to the same memory (a KV cache updated in place).
    """

    def __init__(self, backend: EngineBackend, name: str) -> None:
        self.name = name
        self.bindings = {binding.name: binding for binding in backend.bindings}
        self.supports_empty_tensors = backend.supports_empty_tensors
        self._backend = backend
        self._snapshot: BindingSnapshot | None = None
        self._bound: OrderedDict[BindingSnapshot, Any] = OrderedDict()  # the latest one last
        self._graphs: dict[BindingSnapshot, Any] = {}  # of bindings that are kept
        self._recording = True

    @property
    def snapshot(self) -> BindingSnapshot | None:
        """What is bound; None before a successful `prepare`."""
        return self._snapshot

    @property
    def bound(self) -> Any:
        """What the backend made of it. Whoever records a run keeps this as long as the record."""
        return self._bound.get(self._snapshot)

    @classmethod
    def open(cls, path: str | Path, device: Device, threads: int = 0, backend: str = "") -> EngineExecutor:
        """Load an engine file `model.onnx`: the file itself, or what lies beside it for the backend.

        `threads` of the CPU, 0 = one per core; `backend`: one of BACKENDS, "" = the one of the device.
        FileNotFoundError, EngineError; ValueError for an unknown backend.
        """
        path = Path(path)
        backend = backend or ("tensorrt" if device.name == "tensorrt" else "onnxruntime")
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}, expected one of {', '.join(BACKENDS)}")
        if backend == "tensorrt":
            from edgellm_ros.engine.tensorrt_backend import TensorRTBackend

            tensorrt = TensorRTBackend(path, device)
            return cls(tensorrt, f"{path.parent.name}/{tensorrt.path.name}")
        from edgellm_ros.engine.onnxruntime_backend import OnnxRuntimeBackend

        variant = path.with_suffix(f".{device.memory}{path.suffix}")  # model.cuda.onnx
        if variant.is_file():
            path = variant
        return cls(OnnxRuntimeBackend(path, device, threads), f"{path.parent.name}/{path.name}")

    def dtype(self, name: str) -> np.dtype:
        """Element type of a binding. EngineError if the engine has no such binding."""
        if name not in self.bindings:
            raise EngineError(f"{self.name}: no binding {name!r}; it has {', '.join(self.bindings)}")
        return self.bindings[name].dtype

    def prepare(
        self, profile: int, dims: Mapping[str, int], tensors: Mapping[str, Tensor], stream: Any = None
    ) -> None:
        """Check every tensor against its binding with the symbols replaced by `dims`, and bind it.

        `tensors` must name exactly the engine's inputs and outputs. EngineError says which binding is
        missing, unknown or of another type or shape.
        """
        try:
            snapshot = BindingSnapshot(
                profile, tuple([(tensors[name].pointer, tensors[name].shape) for name in self.bindings])
            )
        except KeyError:
            snapshot = None
        if snapshot is not None and snapshot == self._snapshot and len(tensors) == len(self.bindings):
            return
        self._snapshot = None
        if snapshot not in self._bound or len(tensors) != len(self.bindings):
            self._check(dims, tensors)
            self._bound[snapshot] = self._backend.bind(profile, tensors, stream)
            if len(self._bound) > KEPT_BINDINGS:
                oldest, _ = self._bound.popitem(last=False)
                self._graphs.pop(oldest, None)
        self._bound.move_to_end(snapshot)
        self._snapshot = snapshot

    def execute(self, stream: Any = None) -> None:
        """Replay the graph captured for what is bound, or else run the engine.

        EngineError before `prepare` or on failure.
        """
        if self._snapshot is None:
            raise EngineError(f"{self.name}: execute without a successful prepare")
        graph = self._graphs.get(self._snapshot) if self._graphs else None
        if graph is not None:
            graph.launch(stream)
        else:
            self._backend.run(self._bound[self._snapshot], stream)

    def capture_graph(self, stream: Any = None) -> bool:
        """Record what is bound as a graph that `execute` replays from then on.

        False where the backend has no graphs.
        """
        if self._snapshot is None:
            raise EngineError(f"{self.name}: capture_graph without a successful prepare")
        graph = self._backend.capture(self._bound[self._snapshot], stream)
        if graph is None:
            return False
        self._graphs[self._snapshot] = graph
        return True

    def record(self, stream: Any = None) -> None:
        """Capture what is bound and has been executed, for those who can do without.

        Nothing happens where that was done before; that it cannot be done is logged, and not tried again.
        """
        if not self._recording or self._snapshot in self._graphs:
            return
        try:
            self._recording = self.capture_graph(stream)
        except DeviceLostError:
            raise
        except EngineError as error:
            self._recording = False
            logger.warning("%s runs without graphs: %s", self.name, error)

    def _check(self, dims: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        missing = [name for name in self.bindings if name not in tensors]
        unknown = [name for name in tensors if name not in self.bindings]
        if missing or unknown:
            problems = [f"{name!r} is not bound" for name in missing] + [
                f"there is no {name!r}" for name in unknown
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
                f"{self.name}: no value for dimension {error} of {binding.name}, only {dict(dims)}"
            ) from None
