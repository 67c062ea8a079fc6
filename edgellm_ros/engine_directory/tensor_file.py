# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files of an engine directory with one tensor each."""

from __future__ import annotations

import contextlib
import mmap
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_tensor(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Read the tensor of this name and shape.

    ValueError names the file and its tensors.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
    if name not in tensors or tensors[name].shape != shape:
        found = {found: list(tensor.shape) for found, tensor in tensors.items()}
        raise ValueError(f"{path}: expected a tensor {name!r} {list(shape)}, found {found}")
    return tensors[name]


def map_tensor(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Map the tensor of this name and shape, of floats, into memory.

    A page takes memory of the process when it is used, and changes stay in the process. ValueError as in
    `read_tensor`.
    """
    try:
        with safe_open(path, "numpy") as tensors:
            slices = {found: tensors.get_slice(found) for found in tensors.keys()}  # noqa: SIM118
            found = {each: (tuple(part.get_shape()), part.get_dtype()) for each, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
    if list(found) != [name] or found[name][0] != shape or found[name][1] not in FLOATS:
        texts = {each: f"{kind} {list(sizes)}" for each, (sizes, kind) in found.items()}
        raise ValueError(f"{path}: expected one tensor {name!r} {list(shape)} of floats, found {texts}")
    kind = found[name][1]
    if kind == "BF16":
        import ml_dtypes  # NumPy lacks the type

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(FLOATS[kind])
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(pages, "madvise"):
        with contextlib.suppress(OSError):  # it is advice only
            pages.madvise(mmap.MADV_WILLNEED)  # from the disk before the first request
    values = prod(shape)
    start = len(pages) - values * dtype.itemsize  # a file with one tensor ends with it
    return np.frombuffer(pages, dtype, values, start).reshape(shape)


def read_vocab_map(engine_dir: Path, config: LanguageModelConfig) -> np.ndarray:
    """Read the token of each logit, ascending [V] int64.

    ValueError if the file does not fit the config.
    """
    path = engine_dir / "vocab_map.safetensors"
    ids = read_tensor(path, "vocab_map", (config.reduced_vocab_size,)).astype(np.int64)
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ValueError(f"{path}: vocab_map must be rising token ids below {config.vocab_size}")
    return ids
