# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources of this folder, compiled with NVRTC, and a cache of the results on disk.

Needs neither a GPU nor CUDA's headers, so a cache can be filled for another machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.cuda import layout

SOURCES = (  # one program, in this order
    "common.cuh",
    "order.cuh",
    "random.cuh",
    "rows.cu",
    "steps.cu",
    "sampling.cu",
    "log_probabilities.cu",
)
DIGEST_BYTES = hashlib.sha256().digest_size


def source() -> str:
    """The program of all kernels; messages of the compiler name the file and its line."""
    folder = Path(__file__).parent
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text(encoding="utf-8")}' for name in SOURCES)


def options(arch: str) -> ProgramOptions:
    """How the kernels are compiled. No fused multiply-adds where none is written: sums as on the host."""
    macros = [
        ("ROW_SCRATCH_BYTES", str(layout.ROW_SCRATCH_BYTES)),
        ("MOST_LOGPROBS", str(layout.MOST_LOGPROBS)),
    ]
    return ProgramOptions(arch=arch, std="c++17", fma=False, define_macro=macros)


def compile_kernels(arch: str) -> bytes:
    """The kernels as a cubin for an architecture such as "sm_90". EngineError with the compiler's words."""
    try:
        return bytes(Program(source(), "c++", options(arch)).compile("cubin").code)
    except Exception as error:  # cuda-core has no class that covers a bad architecture and a bad program
        raise EngineError(f"cannot compile the CUDA kernels for {arch!r}: {error}") from error


def cached_kernels(arch: str, directory: Path | None = None) -> bytes:
    """`compile_kernels`, kept in a folder (default: ~/.cache/edgellm_ros/cuda, or below XDG_CACHE_HOME).

    A file that is damaged is made anew; a folder that cannot be written to costs the time of compiling only.
    """
    file = (directory or cache_directory()) / f"{arch}-{_key(arch)}.cubin"
    try:
        content = file.read_bytes()
    except OSError:
        content = b""
    digest, cubin = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if not cubin or hashlib.sha256(cubin).digest() != digest:
        cubin = compile_kernels(arch)
        _write(file, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def cache_directory() -> Path:
    """Where compiled kernels are kept (XDG base directory specification).

    Without a home, where temporary files are.
    """
    home = Path(os.path.expanduser("~"))  # `~` itself where nobody knows
    cache = os.environ.get("XDG_CACHE_HOME") or (
        home / ".cache" if home.is_absolute() else tempfile.gettempdir()
    )
    return Path(cache) / "edgellm_ros" / "cuda"


def _key(arch: str) -> str:
    """Of all that the cubin depends on."""
    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise EngineError(f"NVRTC does not tell its version: {status.name}")
    parts = (source(), arch, f"{major}.{minor}", repr(options(arch).as_bytes("nvrtc")))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _write(file: Path, content: bytes) -> None:
    """Write a file that is whole or not there, if its folder allows."""
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
