# SPDX-License-Identifier: Apache-2.0
"""The fused kernels without a GPU: their sources, compiled for the host."""

from __future__ import annotations

import ctypes
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from doubles.cuda_double import DoubleDevice
from doubles.host_compiler import BLOCKS, build_library
from edgellm_ros.fused.params import KernelParams
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.sources import PRIMITIVES, expand

FOLDER = Path(__file__).parent
# of programs other than those of a decode step, by their source
KERNELS = {
    "fusion.cu": ("fuse", "fused_states"),
    "chain.cu": ("draft_chain",),
    "prompt.cu": ("draft_prompt",),
    "vision.cu": (
        "begin_patches",
        "begin_tiles",
        "norm_patches",
        "norm_merged",
        "rope_patches",
        "patch_attention",
        "activate_merged",
    ),
    "prompt_mixer.cu": ("convolve_tokens", "prepare_chunks", "scan_chunks", "gate_tokens"),
    "prefill.cu": (
        "norm_tokens",
        "rope_tokens",
        "prompt_attention",
        "combine_prompt",
        "activate",
        "keep_last",
        "last_tokens",
        "join_states",
        "round_states",
    ),
}


class FusedDoubleDevice(DoubleDevice):
    """Host memory, and the sizes of a GPU."""

    arch = "sm_90"
    most_shared_memory = 227 << 10


class HostKernels:
    """Kernels in a library; each has ended when `launch` returns."""

    def __init__(self, library: Path) -> None:
        self._launch = ctypes.CDLL(str(library)).launch

    def launch(self, launch: Launch, params: KernelParams) -> None:
        packed = np.array(params.pack(), np.int64)
        pointer = ctypes.c_void_p(packed.ctypes.data)
        status = self._launch(
            launch.name.encode(), *launch.grid, launch.threads, launch.shared, launch.cluster, pointer,
            len(packed),
        )  # fmt: skip
        assert status == 0, f"{launch.name} with {len(packed)} arguments: {status}"


class FusedDoubleProgram:
    """FusedProgram on the host; the first launch compiles the plan's kernels."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    @cached_property
    def _kernels(self) -> HostKernels:
        root = self._plan.source
        names = KERNELS.get(root, ())
        if ("FUSED_SIZE", "0") in self._plan.macros():
            names = tuple(name for name in names if not name.endswith("_states"))
        return build(on_cpu(root), self._plan.macros(), names)

    def launch(self, launch: Launch, params: KernelParams) -> None:
        self._kernels.launch(launch, params)

    def most_clusters(self, launch: Launch) -> int:
        return 8


def on_cpu(root: str) -> str:
    """Return a source with its includes, but those of `primitives_on_cpu.h`."""
    return expand(root, {PRIMITIVES: ""})


def build(source: str, macros: list[tuple[str, str]], kernels: tuple[str, ...] = ()) -> HostKernels:
    """Return compiled kernels that need `primitives.cuh`.

    kernels: their names; empty = those of a decode step.
    """
    options = ["-Og", "-w", *(f"-D{name}={value}" for name, value in macros)]
    if kernels:
        options.append(f"-DKERNELS={' '.join(f'KERNEL({name})' for name in kernels)}")
    runtime = (BLOCKS, FOLDER / "clusters.cpp")
    return HostKernels(build_library(FOLDER / "launch.cpp", source, runtime, options))
