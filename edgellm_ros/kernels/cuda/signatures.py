# SPDX-License-Identifier: Apache-2.0
"""The names of the kernels' parameters, read from the sources.

A launch names its parameters; their order is that of the source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

# Kernels for units of 1 to 16 bytes are written by macros as NAME_##width and launched as NAME_16.
KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\(\w+\)\s+)?(\w+?)(?:_##width)?\(([^()]*)\)'
)
NAME = re.compile(r"(\w+)\s*\\?\s*$")  # the last word of a parameter, before the end of a macro's line


@cache
def signatures() -> dict[str, tuple[str, ...]]:
    """Return the names of the parameters of every kernel, in their order."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.cu")):
        for kernel, parameters in KERNEL.findall(path.read_text(encoding="utf-8")):
            found[kernel] = tuple(NAME.search(each)[1] for each in parameters.split(","))  # type: ignore[index]
    return found


def in_order(kernel: str, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of a kernel's parameters in their order.

    TypeError for an unknown kernel, and for a name that is missing or that the kernel does not have.
    """
    names, values_of = _reader(kernel)
    if len(parameters) == len(names):
        try:
            return values_of(parameters)
        except KeyError:
            pass
    missing = [name for name in names if name not in parameters]
    unknown = [name for name in parameters if name not in names]
    raise TypeError(f"kernel {kernel}: parameters missing: {missing}, unknown: {unknown}")


@cache
def _reader(kernel: str) -> tuple[tuple[str, ...], Callable[[Mapping[str, Any]], tuple[Any, ...]]]:
    """Return a kernel's parameter names, and a function that reads their values."""
    known = signatures()
    names = known.get(kernel) or known.get(kernel.rpartition("_")[0])
    if names is None:
        raise TypeError(f"unknown kernel {kernel}")
    if len(names) == 1:
        return names, lambda parameters: (parameters[names[0]],)
    return names, itemgetter(*names)
