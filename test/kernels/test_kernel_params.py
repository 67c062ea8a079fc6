# SPDX-License-Identifier: Apache-2.0
"""The parameters of the fused kernels, in their launches and their sources."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from typing import get_args, get_type_hints

import pytest

from edgellm_ros.fused.params import KernelParams, LastStateParams
from edgellm_ros.fused.sources import KERNELS

ALL = KernelParams.__subclasses__()
KERNEL = re.compile(r'extern "C" __global__ void[^;{]*?\b(\w+)\(([^()]*)\)\s*\{')


def declared(source: str) -> dict[str, list[tuple[str, str]]]:
    """Return type and name of each parameter of the kernels of a file."""
    found = {}
    for name, parameters in KERNEL.findall((KERNELS / source).read_text()):
        pairs = [re.fullmatch(r"(.*\W)(\w+)", each.strip()).groups() for each in parameters.split(",")]
        found[name] = [(kind.strip(), parameter) for kind, parameter in pairs]
    return found


@pytest.mark.parametrize("params", ALL, ids=lambda params: params.__name__)
def test_names_order_and_types_are_those_of_the_kernel(params):
    hints = get_type_hints(params, include_extras=True)
    fields = [(get_args(hints[field.name])[1], field.name) for field in dataclasses.fields(params)]
    assert fields == declared(params.source)[params.kernel]


def test_every_kernel_has_parameters():
    kernels = {(path.name, name) for path in KERNELS.glob("*.cu") for name in declared(path.name)}
    assert kernels == {(params.source, params.kernel) for params in ALL}


def test_values_are_packed_in_the_order_of_the_kernel():
    packed = LastStateParams(rows=3, out=2, residual=1).pack()
    assert list(packed) == [1, 2, 3]
    assert ctypes.sizeof(packed) == 24
