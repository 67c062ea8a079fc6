# SPDX-License-Identifier: Apache-2.0
"""What an engine file's own library must offer to the EngineExecutor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgellm_ros.engine.tensor import Tensor


@dataclass(frozen=True)
class Binding:
    """One input or output of an engine. Dimensions are numbers or symbols such as "B"."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]
    is_input: bool


class EngineBackend(Protocol):
    """What an engine file's own library must offer.

    Tensors that arrive here are complete and of the right types.
    `supports_empty_tensors`: whether a dimension may be 0.
    """

    bindings: tuple[Binding, ...]
    supports_empty_tensors: bool

    def bind(self, profile: int, tensors: Mapping[str, Tensor], stream: Any) -> Any:
        """What runs the engine on these tensors; several may be kept. EngineError where a shape is outside
        the profile.
        """
        ...

    def run(self, bound: Any, stream: Any) -> None:
        """Run with what `bind` returned."""
        ...

    def capture(self, bound: Any, stream: Any) -> Any | None:
        """Record such a run, as an object with `launch(stream)`; None without such a thing.

        The caller keeps `bound` as long as what it gets.
        """
        ...
