# SPDX-License-Identifier: Apache-2.0
"""Compiles the CUDA sources with NVRTC, and caches the results on disk.

Needs neither a GPU nor CUDA's headers, so a cache can be filled for another machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from edgellm_ros.cache_folder import cache_folder
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.cuda import layout

COMMON = ("common.cuh", "order.cuh", "random.cuh", "sampler.cuh", "rope.cuh")
# files of a program, in this order
KERNELS = (*COMMON, "rows.cu", "steps.cu", "pixels.cu", "sampling.cu", "log_probabilities.cu")
TREE_KERNELS = (*COMMON, "tree.cu", "states.cu")
SIZES = (
    "MAX_BLOCKS_PER_ROW",
    "ROW_SCRATCH_BYTES",
    "MOST_LOGPROBS",
    "TOP_SHARE",
    "SELECT_THREADS",
    "STATE_COLUMNS",
    "STATE_THREADS",
    "MOST_CANDIDATES",
    "MOST_TABLE_ENTRIES",
    "MOST_TREE_NODES",
    "MOST_CHAIN_TOKENS",
)  # of `layout`
Files = tuple[str, ...]
DIGEST_BYTES = hashlib.sha256().digest_size


def source(files: Files = KERNELS) -> str:
    """Return the program of some files; compiler messages name file and line."""
    return join_sources(Path(__file__).parent, files)


def join_sources(folder: Path, files: Files) -> str:
    """Return files of a folder as one program."""
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text(encoding="utf-8")}' for name in files)


def options(arch: str) -> ProgramOptions:
    """Return the compiler's options.

    Fused multiply-adds are off unless written out, so sums are the same as on the host.
    """
    return ProgramOptions(arch=arch, std="c++17", fma=False, define_macro=macros())


def macros() -> list[tuple[str, str]]:
    """Return names and values of the sizes that the kernels share with the host."""
    return [(name, str(getattr(layout, name))) for name in SIZES]


def compile_kernels(arch: str, files: Files = KERNELS) -> bytes:
    """Compile a program to a cubin for an architecture such as "sm_90".

    EngineError with the compiler's message.
    """
    return compile_source(arch, source(files), options(arch))


def compile_source(arch: str, program: str, chosen: ProgramOptions) -> bytes:
    """Compile a program to a cubin. EngineError with the compiler's message."""
    try:
        return bytes(Program(program, "c++", chosen).compile("cubin").code)
    except Exception as error:  # cuda-core has no class that covers a bad architecture and a bad program
        raise EngineError(f"cannot compile the CUDA kernels for {arch!r}: {error}") from error


def cached_kernels(arch: str, directory: Path | None = None, files: Files = KERNELS) -> bytes:
    """Return a program's cubin for an architecture, compiled or from a cache folder.

    directory: None = `cache_folder("cuda")`.
    """
    return cached(arch, source(files), options(arch), lambda: compile_kernels(arch, files), directory)


def cached(
    arch: str,
    program: str,
    chosen: ProgramOptions,
    compile: Callable[[], bytes],
    directory: Path | None = None,
) -> bytes:
    """Return the cubin of a program from a cache folder, compiled if there is none.

    A damaged file is replaced. If the folder is not writable, the
    kernels are compiled each time.
    """
    file = (directory or cache_folder("cuda")) / f"{arch}-{_key(arch, program, chosen)}.cubin"
    try:
        content = file.read_bytes()
    except OSError:
        content = b""
    digest, cubin = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if not cubin or hashlib.sha256(cubin).digest() != digest:
        cubin = compile()
        _write(file, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _key(arch: str, program: str, chosen: ProgramOptions) -> str:
    """Return a hash of everything that the cubin depends on."""
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise EngineError(f"cannot read the version of NVRTC: {status.name}")
    parts = (program, arch, f"{major}.{minor}", repr(chosen.as_bytes("nvrtc")))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically, best effort."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            os.replace(part, file)
        except BaseException:
            os.unlink(part)
            raise
