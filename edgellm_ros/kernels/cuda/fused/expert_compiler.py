# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of an action expert for one shape and GPU."""

from __future__ import annotations

from pathlib import Path

from cuda.core import ProgramOptions

from edgellm_ros.kernels.cuda.compiler import cached, compile_source
from edgellm_ros.kernels.cuda.fused.compiler import HARDWARE, source
from edgellm_ros.kernels.cuda.fused.expert_plan import ExpertPlan

FILES = ("expert_product.cuh", "expert_attention.cuh", "expert.cu")
KERNELS = ("qkv", "attention", "o", "gate_up", "down", "finish")


def options(arch: str, plan: ExpertPlan) -> ProgramOptions:
    """Return the compiler's options."""
    return ProgramOptions(arch=arch, std="c++17", define_macro=plan.macros())


def cached_kernels(arch: str, plan: ExpertPlan, directory: Path | None = None) -> bytes:
    """Return the cubin of a plan's kernels, compiled or from the cache folder."""
    program, chosen = source((HARDWARE, *FILES)), options(arch, plan)
    return cached(arch, program, chosen, lambda: compile_source(arch, program, chosen), directory)
