# SPDX-License-Identifier: Apache-2.0
"""Variants of the same kernels, by the largest number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgellm_ros.fused.params import KernelParams
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.launch import Launch

Step = tuple[Any, Launch, KernelParams]  # a program, and a launch of one of its kernels
Compile = Callable[[Any], Any]  # a plan to an object with the method `launch` of `FusedProgram`


@dataclass(frozen=True)
class Variant:
    """The kernels for up to `plan.rows` rows."""

    plan: FusedPlan
    program: Any


def variant_for(variants: Mapping[int, Variant], rows: int) -> Variant:
    """Return the variant for the fewest rows that takes `rows` rows."""
    return next(each for size, each in variants.items() if size >= rows)


def compiler_for(device: Any) -> Callable[[Any], Any]:
    """Return a function that makes a device's program of a plan.

    Programs come from the cache of compiled kernels.
    """
    from edgellm_ros.fused.cuda.compiler import cached_kernels
    from edgellm_ros.fused.cuda.program import FusedProgram

    return lambda plan: FusedProgram(device, cached_kernels(device.arch, plan))
