# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face checkpoint without PyTorch: JSON and safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from edgellm_ros.engine_directory.schema import read_json

FLOAT_DTYPES = ("F16", "BF16", "F32")


class Weights:
    """The tensors of a checkpoint.

    The tensors are in `model.safetensors`, or in the shards that `model.safetensors.index.json` lists. The
    constructor reads only the headers; `read` loads one tensor.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        weight_map: dict[str, str] = {}
        if index.is_file():
            weight_map = read_json(index).get("weight_map") or {}
            if not weight_map:
                raise ValueError(f"{index}: weight_map is missing or empty")
        self._files: dict[str, Any] = {}
        for file in sorted(set(weight_map.values())) or ["model.safetensors"]:
            handle = _open(directory / file)
            self._files.update(dict.fromkeys(handle.keys(), handle))
        for name, file in weight_map.items():
            if name not in self._files:
                raise ValueError(f"{directory / file}: tensor {name!r} is missing, but {index.name} lists it")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def has_module(self, name: str) -> bool:
        """Tell whether the checkpoint has any tensor of the module `name`."""
        return any(tensor.startswith(f"{name}.") for tensor in self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        ValueError if the tensor is missing or holds no floats.
        """
        if name not in self._files:
            raise ValueError(f"{self.directory}: tensor {name!r} is missing")
        entry = self._files[name].get_slice(name)
        dtype = entry.get_dtype()
        if dtype not in FLOAT_DTYPES:
            supported = ", ".join(FLOAT_DTYPES)
            raise ValueError(f"{self.directory}: tensor {name!r} has dtype {dtype}; supported: {supported}")
        return tuple(entry.get_shape())

    def require(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError unless a tensor has this shape."""
        found = list(self.shape(name))
        if found != list(shape):
            raise ValueError(
                f"{self.directory}: tensor {name!r} has shape {found}, but by the config it is {list(shape)}"
            )

    def read(self, name: str) -> np.ndarray:
        """Read one tensor in its stored type."""
        return self._files[name].get_tensor(name)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or cut short: {error}") from None
