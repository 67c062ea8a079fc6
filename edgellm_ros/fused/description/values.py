# SPDX-License-Identifier: Apache-2.0
"""ModelValues: what the kernels of a decoder are compiled with as it is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelValues:
    """Numbers and switches of a model.

    Each is a key of `llm/fused.json` and a macro of the kernels, whose name is that of the field in capitals.
    Draft heads and kernels that lack a value have its default (`differing` tells which do not).
    """

    epsilon: float = 1e-6  # of every RMSNorm
    rope_interleaved: bool = False  # a pair of rotated values is (2i, 2i + 1); else (i, i + R/2)
    attention_gate: bool = False  # a gate beside each head's query; its sigmoid multiplies the head's result
    time_step_min: float = 0.0  # smallest step of Mamba2

    def values(self) -> dict[str, Any]:
        """Return the values by name."""
        return {field.name: getattr(self, field.name) for field in fields(ModelValues)}

    def macros(self) -> dict[str, str]:
        """Return the macros' names and values."""
        return {
            name.upper(): f"{value!r}f" if isinstance(value, float) else str(int(value))
            for name, value in self.values().items()
        }

    def differing(self, *known: str) -> list[str]:
        """Return the names of values that are not the default, without the known ones."""
        defaults = ModelValues().values()
        return [
            name for name, value in self.values().items() if name not in known and value != defaults[name]
        ]
