# SPDX-License-Identifier: Apache-2.0
"""EngineBackend: the interface of a library that loads and runs engine files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edgellm_ros.engine.tensor import Shape, Tensor

SELECTORS = ("min", "opt", "max")  # smallest, tuned and largest shape of a profile


@dataclass(frozen=True)
class Binding:
    """One input or output of an engine."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]  # numbers, or symbols such as "B" for dimensions that vary
    is_input: bool


class EngineBackend(Protocol):
    """One loaded engine file.

    The EngineExecutor checks names, types and shapes before `bind`.
    """

    bindings: tuple[Binding, ...]  # inputs, then outputs
    supports_empty_tensors: bool  # whether a dimension may be 0

    def bind(self, profile: int, tensors: Mapping[str, Tensor], stream: Any) -> Any:
        """Bind the engine to these tensors and return the binding.

        The caller may keep several bindings. EngineError for a shape outside the profile.
        """
        ...

    def run(self, bound: Any, stream: Any) -> None:
        """Run the engine with a binding that `bind` returned."""
        ...

    def capture(self, bound: Any, stream: Any) -> Any | None:
        """Record a run as a graph with a method `launch(stream)`; None without graphs.

        The caller keeps `bound` as long as the graph.
        """
        ...


@runtime_checkable
class InterruptibleBackend(EngineBackend, Protocol):
    """A backend whose runs another thread can end."""

    def interrupt(self) -> None:
        """Let runs fail soon, the current one and later ones, until `resume`."""
        ...

    def resume(self) -> None:
        """Undo `interrupt`."""
        ...


@runtime_checkable
class PlannedBackend(EngineBackend, Protocol):
    """A backend whose engines were built for ranges of shapes.

    Engines run in memory of the caller.
    """

    context_memory_size: int  # bytes that a run needs for intermediate results

    def profile_shape(self, name: str, profile: int, selector: str) -> Shape:
        """Return an input's shape in a profile; `selector`: one of SELECTORS. EngineError."""
        ...

    def set_context_memory(self, memory: Tensor) -> None:
        """Run in this memory from now on. EngineError if the memory does not fit."""
        ...
