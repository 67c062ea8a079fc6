# SPDX-License-Identifier: Apache-2.0
"""Tells which weights of a checkpoint an export leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm_ros.builder.weights.weights import Weights


@dataclass(frozen=True)
class UnreadWeights:
    """Tensors of a checkpoint that no graph has."""

    name: str  # the first part of their names, such as "mtp.*"; numbers that differ are *
    tensors: int
    bytes: int

    def __str__(self) -> str:
        plural = "" if self.tensors == 1 else "s"
        return f"{self.name} ({self.tensors} tensor{plural}, {_size(self.bytes)})"


def unread_weights(weights: Weights) -> tuple[UnreadWeights, ...]:
    """List the weights that no graph has read, largest first.

    Call it when all graphs are made. Tensors of a module are listed together if none of the module was read.
    """
    unused = weights.unused
    names = {tensor.name for tensor in unused}
    read = {module for name in weights.names if name not in names for module in _modules(name)}
    groups: dict[str, dict[str, list[int]]] = {}  # name without numbers -> name -> bytes of its tensors
    for tensor in unused:
        name = next((module for module in _modules(tensor.name) if module not in read), None)
        name = tensor.name if name is None else f"{name}.*"
        group = ".".join("*" if part.isdigit() else part for part in name.split("."))
        groups.setdefault(group, {}).setdefault(name, []).append(tensor.size)
    found = []
    for group, members in groups.items():
        sizes = [size for each in members.values() for size in each]
        name = group if len(members) > 1 else next(iter(members))
        found.append(UnreadWeights(name, len(sizes), sum(sizes)))
    return tuple(sorted(found, key=lambda each: (-each.bytes, each.name)))


def listed(unread: Sequence[UnreadWeights]) -> str:
    """Format the largest unread weights and their total size in bytes."""
    shown = ", ".join(map(str, unread[:4]))
    more = f" and {len(unread) - 4} more" if len(unread) > 4 else ""
    return f"{_size(sum(each.bytes for each in unread))} of weights are not read: {shown}{more}"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"


def _modules(name: str) -> list[str]:
    """Return the modules that a tensor is in, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
