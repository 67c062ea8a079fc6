# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused kernels for one shape and GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from cuda.core import ProgramOptions

from edgellm_ros.fused.sources import expand
from edgellm_ros.kernels.cuda.compiler import cached, compile_source


class Plan(Protocol):
    """What a program is compiled with, such as a `FusedPlan`."""

    @property
    def source(self) -> str:
        """Name of the source in the folder `kernels`."""
        ...

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of macros."""
        ...


def options(arch: str, plan: Plan) -> ProgramOptions:
    """Return the compiler's options."""
    return ProgramOptions(arch=arch, std="c++17", define_macro=plan.macros())


def compile_kernels(arch: str, plan: Plan) -> bytes:
    """Compile a plan's kernels to a cubin. EngineError with the compiler's message."""
    return compile_source(arch, expand(plan.source), options(arch, plan))


def cached_kernels(arch: str, plan: Plan, directory: Path | None = None) -> bytes:
    """Return the cubin of a plan's kernels, compiled or from the cache folder."""
    program, chosen = expand(plan.source), options(arch, plan)
    return cached(arch, program, chosen, lambda: compile_source(arch, program, chosen), directory)
