# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files of an engine directory with one tensor each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


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


def read_vocab_map(engine_dir: Path, config: LanguageModelConfig) -> np.ndarray:
    """Read the token of each logit, ascending [V] int64.

    ValueError if the file does not fit the config.
    """
    path = engine_dir / "vocab_map.safetensors"
    ids = read_tensor(path, "vocab_map", (config.reduced_vocab_size,)).astype(np.int64)
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ValueError(f"{path}: vocab_map must be rising token ids below {config.vocab_size}")
    return ids
