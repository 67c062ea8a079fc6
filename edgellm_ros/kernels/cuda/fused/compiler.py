# SPDX-License-Identifier: Apache-2.0
"""Compiles the fused kernels for one shape and GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from cuda.core import ProgramOptions

from edgellm_ros.kernels.cuda.compiler import cached, compile_source, join_sources
from edgellm_ros.kernels.cuda.fused.plan import FILES

HARDWARE = "primitives.cuh"  # not for a host compiler


class Plan(Protocol):
    """What a program is compiled with, such as a `FusedPlan`."""

    @property
    def files(self) -> tuple[str, ...]:
        """Sources after HARDWARE."""
        ...

    def macros(self) -> list[tuple[str, str]]:
        """Return names and values of macros."""
        ...


def source(files: tuple[str, ...] = (HARDWARE, *FILES)) -> str:
    """Return the program."""
    return join_sources(Path(__file__).parent, files)


def options(arch: str, plan: Plan) -> ProgramOptions:
    """Return the compiler's options."""
    return ProgramOptions(arch=arch, std="c++17", define_macro=plan.macros())


def cached_kernels(arch: str, plan: Plan, directory: Path | None = None) -> bytes:
    """Return the cubin of a plan's kernels, compiled or from the cache folder."""
    program, chosen = source((HARDWARE, *plan.files)), options(arch, plan)
    return cached(arch, program, chosen, lambda: compile_source(arch, program, chosen), directory)
