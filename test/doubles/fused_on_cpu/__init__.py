# SPDX-License-Identifier: Apache-2.0
"""The fused kernels without a GPU: their sources, compiled for the host."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

from doubles.cuda_double import DoubleDevice
from edgellm_ros.kernels.cuda.fused.plan import FusedPlan

FOLDER = Path(__file__).parent


class FusedDoubleDevice(DoubleDevice):
    """Host memory, and the sizes of a GPU."""

    arch = "sm_90"
    most_shared_memory = 227 << 10


class FusedDoubleProgram:
    """FusedProgram on the host: `launch` returns when the kernel has ended."""

    def __init__(self, library: Path) -> None:
        self._launch = ctypes.CDLL(str(library)).launch

    def launch(self, launch, *arguments: int) -> None:
        packed = np.array(arguments, np.int64)
        pointer = ctypes.c_void_p(packed.ctypes.data)
        status = self._launch(
            launch.name.encode(), *launch.grid, launch.threads, launch.shared, pointer, len(arguments)
        )
        assert status == 0, f"{launch.name} with {len(arguments)} arguments: {status}"


def build(folder: Path, plan: FusedPlan) -> FusedDoubleProgram:
    """Compile the kernels of a plan in `folder`."""
    from edgellm_ros.kernels.cuda.fused.compiler import FILES, source

    made = folder / str(len(list(folder.iterdir())))
    made.mkdir()
    (made / "fused.inc").write_text(source(FILES))
    library = made / "fused.so"
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w"]
    # for jumps between stacks; for libraries of several plans in one process
    options += ["-U_FORTIFY_SOURCE", "-Wl,-Bsymbolic", "-fno-gnu-unique"]
    options += [f"-D{name}={value}" for name, value in plan.macros()]
    places = [f"-I{FOLDER}", f"-I{FOLDER.parent / 'cuda_on_cpu'}", f"-I{made}", str(FOLDER / "launch.cpp")]
    subprocess.run(["g++", *options, *places, "-o", str(library)], check=True)
    return FusedDoubleProgram(library)
