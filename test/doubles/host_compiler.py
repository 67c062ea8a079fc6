# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA sources for the host, with the emulation in `cuda_on_cpu`."""

from __future__ import annotations

import functools
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from doubles.compiled_files import cached

EMULATION = Path(__file__).parent
FOLDERS = (EMULATION / "cuda_on_cpu", EMULATION / "fused_on_cpu")
BLOCKS = FOLDERS[0] / "blocks.cpp"
OPTIONS = ["-std=c++17", "-fPIC", "-pthread"]
OPTIONS += ["-U_FORTIFY_SOURCE"]  # for jumps between stacks
LINKED = ["-shared"]
LINKED += ["-Wl,-Bsymbolic", "-fno-gnu-unique"]  # for several libraries in a process, and for names of libc


def build_library(source: Path, kernels: str, runtime: Sequence[Path], options: Sequence[str]) -> Path:
    """Return a library of kernels and files of the emulation, compiled or cached.

    `source` includes the kernels as `kernels.inc`. They use nothing of C++'s library.
    """
    objects = [str(_object(part)) for part in runtime]
    chosen = [*OPTIONS, *LINKED, "-nostdinc++", *options]

    def compile(library: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="edgellm_emulation_") as folder:
            (Path(folder) / "kernels.inc").write_text(kernels)
            _run_compiler([*chosen, f"-I{folder}", str(source), *objects, "-o", str(library)])

    return cached(
        [*_environment(), *chosen, source.name, *(part.name for part in runtime), kernels], ".so", compile
    )


def _object(source: Path) -> Path:
    """Return a file of the emulation, compiled or from the cache folder."""
    chosen = [*OPTIONS, "-O1", "-c"]

    def compile(file: Path) -> None:
        _run_compiler([*chosen, str(source), "-o", str(file)])

    return cached([*_environment(), *chosen, source.name], ".o", compile)


def _run_compiler(arguments: Sequence[str]) -> None:
    subprocess.run(["g++", *(f"-I{folder}" for folder in FOLDERS), *arguments], check=True)


@functools.cache
def _environment() -> tuple[str, ...]:
    """Return what all files depend on: compiler, C library, emulation."""
    compiler = subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr
    files = [file for folder in FOLDERS for file in sorted(folder.glob("*.[ch]*"))]
    return (
        compiler,
        *platform.libc_ver(),
        *(f"{file.parent.name}/{file.name}\0{file.read_text()}" for file in files),
    )
