# SPDX-License-Identifier: Apache-2.0
"""The fused kernels without a GPU: their sources, compiled for the host."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from doubles.cuda_double import DoubleDevice
from doubles.host_compiler import BLOCKS, build_library
from edgellm_ros.kernels.cuda.fused.plan import Launch

FOLDER = Path(__file__).parent
# of programs other than those of a decode step, by their last file
KERNELS = {
    "fusion.cu": ("fuse", "fused_states"),
    "chain.cu": ("draft_chain",),
    "prompt.cu": ("draft_prompt",),
}


class FusedDoubleDevice(DoubleDevice):
    """Host memory, and the sizes of a GPU."""

    arch = "sm_90"
    most_shared_memory = 227 << 10


class HostKernels:
    """Kernels in a library that `build` made; each has ended when `launch` returns."""

    def __init__(self, library: Path) -> None:
        self._launch = ctypes.CDLL(str(library)).launch

    def launch(self, launch: Launch, *arguments: int) -> None:
        packed = np.array(arguments, np.int64)
        pointer = ctypes.c_void_p(packed.ctypes.data)
        status = self._launch(
            launch.name.encode(), *launch.grid, launch.threads, launch.shared, launch.cluster, pointer,
            len(arguments),
        )  # fmt: skip
        assert status == 0, f"{launch.name} with {len(arguments)} arguments: {status}"


class FusedDoubleProgram:
    """FusedProgram on the host.

    The first launch compiles the plan's kernels, unless `folder` has them already.
    """

    def __init__(self, folder: Path, plan: Any) -> None:
        self._folder, self._plan = folder, plan

    @cached_property
    def _kernels(self) -> HostKernels:
        name = hashlib.sha256(repr(self._plan.macros()).encode()).hexdigest()[:16]
        library = self._folder / f"{name}.so"
        if not library.exists():
            from edgellm_ros.kernels.cuda.fused.compiler import source

            files = self._plan.files
            build(library, source(files), self._plan.macros(), KERNELS.get(files[-1], ()))
        return HostKernels(library)

    def launch(self, launch: Launch, *arguments: int) -> None:
        self._kernels.launch(launch, *arguments)

    def most_clusters(self, launch: Launch) -> int:
        return 8


def build(library: Path, source: str, macros: list[tuple[str, str]], kernels: tuple[str, ...] = ()) -> None:
    """Compile kernels that need `primitives.cuh`.

    kernels: their names; empty = those of a decode step.
    """
    (library.parent / "fused.inc").write_text(source)
    options = ["-Og", "-w", f"-I{FOLDER}", *(f"-D{name}={value}" for name, value in macros)]
    if kernels:
        options.append(f"-DKERNELS={' '.join(f'KERNEL({name})' for name in kernels)}")
    build_library(library, FOLDER / "launch.cpp", (BLOCKS, FOLDER / "clusters.cpp"), options)
