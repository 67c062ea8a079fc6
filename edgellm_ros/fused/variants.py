# SPDX-License-Identifier: Apache-2.0
"""Variants of the same kernels, by kind of layers and largest number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.params import KernelParams
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.plan.tuning import Tuning

MOST_COMPILERS = 4  # at once; each takes some 100 MB
Key = TypeVar("Key")
Plan = TypeVar("Plan")
Program = TypeVar("Program")
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


def compile_all(compile: Callable[[Plan], Program], plans: Mapping[Key, Plan]) -> dict[Key, Program]:
    """Make a program of each plan, in threads.

    NVRTC does not hold Python's lock. Errors of `compile` are raised.
    """
    with ThreadPoolExecutor(MOST_COMPILERS) as pool:
        return dict(zip(plans, pool.map(compile, plans.values()), strict=True))


def compile_variants(compile: Compile, plans: Sequence[Mapping[int, FusedPlan]]) -> list[dict[int, Variant]]:
    """Compile the plans of each kind of layers."""
    every = {(kind, rows): plan for kind, each in enumerate(plans) for rows, plan in each.items()}
    programs = compile_all(compile, every)
    return [
        {rows: Variant(plan, programs[kind, rows]) for rows, plan in each.items()}
        for kind, each in enumerate(plans)
    ]


def make_plans(
    device: Any, shape: FusedShape, tuning: Tuning, adapted: bool = False
) -> list[dict[int, FusedPlan]]:
    """Plan the kernels for each kind of layers, by largest number of rows.

    Plans end where the device has too little smem. adapted: for sequences with LoRA adapters.
    """
    return [_plans_of_kind(device, kind, tuning, adapted) for kind in shape.of_each_kind()]


def _plans_of_kind(device: Any, shape: FusedShape, tuning: Tuning, adapted: bool) -> dict[int, FusedPlan]:
    plans, rows = dict[int, FusedPlan](), 1
    while rows < 2 * shape.max_rows:
        sizes = rows, device.multiprocessors, device.most_shared_memory
        try:
            plans[rows] = FusedPlan(shape, *sizes, tuning, adapted)
        except EngineError:
            if rows == 1 and not adapted:
                raise
            break
        rows *= 2
    return plans


def make_scratch(device: Any, plans: Iterable[FusedPlan]) -> dict[str, Tensor]:
    """Allocate the buffers between the kernels of any of the plans."""
    sizes: dict[str, int] = {}
    for plan in plans:
        for name, nbytes in plan.scratch_bytes().items():
            sizes[name] = max(nbytes, sizes.get(name, 0))
    return {name: device.zeros((nbytes,), np.uint8) for name, nbytes in sizes.items()}
