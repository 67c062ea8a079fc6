# SPDX-License-Identifier: Apache-2.0
"""The argument ENGINE of commands that answer: engine directory or GGUF file.

A GGUF file is exported to the user's cache before its first use.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.engine_directory.config import CONFIG_FILE

if TYPE_CHECKING:
    from edgellm_ros.builder.gguf.reader import GgufFile

MOST_CAPACITY = 2048  # tokens
SMALL = 500 << 20  # bytes of a file's tensors


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument ENGINE, which is read as `engine_dir`."""
    parser.add_argument(
        "engine_dir",
        metavar="ENGINE",
        help="directory made by `edgellm export`; or a GGUF file, or a folder with one, which is exported to "
        "~/.cache/edgellm_ros/engines before its first use, with options for the device",
    )


def engine_directory(given: str, device: str) -> str:
    """Return the engine directory that ENGINE names, after the export of a GGUF file.

    Of a GGUF file, one line on standard error has the command that makes the engine directory, and says
    whether it ran before. Raises the errors of `export`; ValueError for a GGUF file on TensorRT.
    """
    if (Path(given) / CONFIG_FILE).is_file():
        return given
    from edgellm_ros.builder.gguf.checkpoint import find_gguf  # with NumPy's types: only for GGUF files

    path = find_gguf(Path(given))
    return given if path is None else str(_export(path, device))


def _export(path: Path, device: str) -> Path:
    from edgellm_ros.builder.export_cache import export_to_cache
    from edgellm_ros.builder.gguf.reader import read_gguf

    options = default_options(read_gguf(path), device)
    exported = False

    def tell(engine: Path) -> None:
        nonlocal exported
        exported = True
        print(f"{path} is exported first: {_command(path, engine, options)}", file=sys.stderr, flush=True)

    engine = export_to_cache(path, tell, **options)
    if not exported:
        print(f"{path} was exported before: {_command(path, engine, options)}", file=sys.stderr, flush=True)
    return engine


def default_options(file: GgufFile, device: str) -> dict[str, Any]:
    """Return the options with which a GGUF file is exported for a device.

    Keys are fields of ExportOptions. The engine has one sequence of at most MOST_CAPACITY tokens. A GPU has
    fp16. A CPU has fp32, and multiplies in 8 bits if all matrices of the layers are blocks (matrices of
    floats would be rounded). Not so a small model in 4 bits: its steps are short in fp32 too, and it loses
    more by the rounding of inputs than a large one.
    """
    if device == "tensorrt":
        raise ValueError(
            f"{file.path}: --device tensorrt runs plans: make them with `edgellm export` and `edgellm build`"
        )
    from edgellm_ros.builder.gguf.architectures import find_architecture
    from edgellm_ros.builder.gguf.keys import Keys, architecture

    find_architecture(file)  # refuses others
    capacity = min(MOST_CAPACITY, Keys(file, architecture(file)).integer("context_length"))
    limits = {
        "max_batch_size": 1,
        "max_input_len": max(capacity // 2, 1),
        "max_kv_cache_capacity": capacity,
    }
    if device != "cpu":
        return {"precision": "fp16", **limits}
    layers = [
        place for name, place in file.tensors.items() if name.startswith("blk.") and len(place.shape) > 1
    ]
    blocks = all(place.type.unpack is not None for place in layers)
    small = sum(place.size for place in file.tensors.values()) < SMALL
    in_4_bits = all(place.type.bits == 4 for place in layers)
    return {"cpu_int8": blocks and not (small and in_4_bits), **limits}


def _command(path: Path, engine: Path, options: dict[str, Any]) -> str:
    """Return the command that makes an engine directory."""
    given = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in options.items()
        if value is not False
    ]
    return f"edgellm export {shlex.join([str(path), str(engine)])} {' '.join(given)} --no-report"
