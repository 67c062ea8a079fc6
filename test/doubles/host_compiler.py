# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA sources for the host, with the emulation in `cuda_on_cpu`."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "cuda_on_cpu"
BLOCKS = FOLDER / "blocks.cpp"
OPTIONS = ["-std=c++17", "-fPIC", "-pthread", f"-I{FOLDER}"]
OPTIONS += ["-U_FORTIFY_SOURCE"]  # for jumps between stacks
LINKED = ["-shared"]
LINKED += ["-Wl,-Bsymbolic", "-fno-gnu-unique"]  # for several libraries in a process, and for names of libc


def build_library(library: Path, source: Path, runtime: Sequence[Path], options: Sequence[str]) -> None:
    """Compile kernels and link them with files of the emulation.

    The kernels use nothing of C++'s library.
    """
    kernels = ["-nostdinc++", *options, f"-I{library.parent}", str(source)]
    objects = [str(_object(part)) for part in runtime]
    subprocess.run(["g++", *OPTIONS, *LINKED, *kernels, *objects, "-o", str(library)], check=True)


@functools.cache
def _object(source: Path) -> Path:
    """Compile a file of the emulation, once in this process."""
    compiled = Path(_objects().name) / f"{source.stem}.o"
    subprocess.run(["g++", *OPTIONS, "-O1", "-c", str(source), "-o", str(compiled)], check=True)
    return compiled


@functools.cache
def _objects() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="edgellm_emulation_")
