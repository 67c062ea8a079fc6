# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors of a Hugging Face checkpoint without PyTorch."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import prod
from pathlib import Path

import numpy as np

from edgellm_ros.builder.checkpoint.safetensors_file import (
    FLOATS,
    AdaptedTensor,
    MultipliedTensor,
    StoredTensor,
    read_header,
)
from edgellm_ros.builder.checkpoint.strips import rows_per_strip, strips
from edgellm_ros.builder.gguf.checkpoint import linked_tensors
from edgellm_ros.builder.quantization.layouts import Layout
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix
from edgellm_ros.echo import printable, quoted
from edgellm_ros.engine_directory.schema import is_file_name, read_json

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Other formats of weights, and what to do with them.
TO_CONVERT = (
    "save it as safetensors with transformers on a computer that trusts the file: "
    "AutoModel.from_pretrained(...).save_pretrained(...)"
)
OTHER_FORMATS = {
    "*.bin": f"PyTorch pickles, which can run code when they are read: {TO_CONVERT}",
    "*.pt": f"PyTorch pickles, which can run code when they are read: {TO_CONVERT}",
    "*.pth": f"PyTorch pickles, which can run code when they are read: {TO_CONVERT}",
    "*.gguf": "weights of llama.cpp: give the path of this file",
    "*.msgpack": f"weights of Flax: {TO_CONVERT}",
    "*.h5": f"weights of TensorFlow: {TO_CONVERT}",
    "consolidated*.safetensors": "weights in Mistral's own format: use the files in Hugging Face format",
}


class Weights:
    """The tensors of a checkpoint.

    The tensors are in `model.safetensors`, or in the shards that `model.safetensors.index.json` lists. The
    constructor reads only the headers; `read` loads one tensor.

    layout: how quantised layers are stored. `matrix` has their weights as they are, `read` as floats.
    """

    def __init__(self, directory: Path, layout: Layout | None = None) -> None:
        self.directory = directory
        self._layout = layout
        self._matrices: dict[str, QuantizedMatrix | None] = {}
        self._used: set[str] = set()  # names in the files
        linked = linked_tensors(directory)
        if linked is not None:
            self.where, self._tensors = next(iter(linked.values())).file, dict(linked)
            return
        index = directory / INDEX
        weight_map = _weight_map(index) if index.is_file() else {}
        self.where = index if weight_map else directory / FILE  # the file that lists all tensors
        if not weight_map and not self.where.is_file():
            raise FileNotFoundError(f"{self.where} not found{_other_format(directory)}")
        files = sorted(set(weight_map.values())) or [FILE]
        for file in files:
            if not (directory / file).is_file():
                raise FileNotFoundError(f"{directory / file} not found, but {index.name} lists it")
        headers = {file: read_header(directory / file) for file in files}
        self._tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
        for name, file in weight_map.items():
            if name not in headers[file]:
                missing = f"tensor {quoted(name)} is missing, but {index.name} lists it"
                raise ValueError(f"{directory / file}: {missing}")
            self._tensors[name] = headers[file][name]

    def __contains__(self, name: str) -> bool:
        module, _, tensor = name.rpartition(".")
        return name in self._tensors or (tensor == "weight" and self._find_matrix(module) is not None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """Return some of the tensors under other names: new name -> name here."""
        view = copy.copy(self)
        view._tensors = {new: self._tensors[old] for new, old in names.items()}
        return view

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor as the file has it, of any type."""
        return self._tensors[name]

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return all tensors as the files have them, by name."""
        return self._tensors

    def multiply(self, name: str, factors: np.ndarray, shift: float = 0.0) -> None:
        """Multiply shift + a tensor by factors from here on.

        The factors have the tensor's shape or are broadcast to it.
        """
        self._tensors[name] = MultipliedTensor.of(self._floats(name), factors, shift)

    def add(self, name: str, left: np.ndarray, right: np.ndarray) -> None:
        """Add left [rows, r] @ right [r, columns] to a matrix from here on."""
        self._tensors[name] = AdaptedTensor.of(self._floats(name), left, right)

    @property
    def parameters(self) -> int:
        """Return the number of values of all tensors."""
        if self._layout is None:
            return sum(prod(tensor.shape) for tensor in self._tensors.values())
        modules = {name: name.rpartition(".")[0] for name in self._tensors}
        found = {module: self._find_matrix(module) for module in modules.values()}
        values = sum(matrix.fan_in * matrix.fan_out for matrix in found.values() if matrix is not None)
        return values + sum(
            prod(tensor.shape)
            for name, tensor in self._tensors.items()
            if found[modules[name]] is None or name.endswith(".bias")
        )

    def quantize(self, layout: Layout) -> None:
        """Give the layers of an unquantised checkpoint `layout`'s weights from here on."""
        if self._layout is not None:
            raise ValueError(f"{self.directory}: the checkpoint is quantised already")
        self._layout = layout
        self._matrices.clear()
        if not self.is_quantized:
            raise ValueError(f"{self.where}: no layer can be quantised: the inputs of none fill a group")

    def matrix(self, module: str) -> QuantizedMatrix | None:
        """Return the weight of a quantised layer; None if it is unquantised or missing."""
        matrix = self._find_matrix(module)
        if matrix is not None:
            self._used |= {each.name for name, each in self._tensors.items() if name.startswith(f"{module}.")}
        return matrix

    def _find_matrix(self, module: str) -> QuantizedMatrix | None:
        if self._layout is None:
            return None
        if module not in self._matrices:
            self._matrices[module] = self._layout.matrix(self._tensors, module)
        return self._matrices[module]

    @property
    def is_quantized(self) -> bool:
        """Tell whether any layer is quantised."""
        return any(self._find_matrix(name.rpartition(".")[0]) is not None for name in self._tensors)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors in the files."""
        return [tensor.name for tensor in self._tensors.values()]

    @property
    def unused(self) -> list[StoredTensor]:
        """Return the tensors that nothing has asked a shape, values or a matrix of."""
        return [tensor for tensor in self._tensors.values() if tensor.name not in self._used]

    def has_module(self, name: str) -> bool:
        """Tell whether the checkpoint has any tensor of the module `name`."""
        return any(tensor.startswith(f"{name}.") for tensor in self._tensors)

    def list_length(self, name: str) -> int:
        """Count the modules of a list.

        The modules are `name.0`, `name.1` and so on, up to the first without tensors.
        """
        inside = (tensor for tensor in self._tensors if tensor.startswith(f"{name}."))
        found = {tensor[len(name) + 1 :].partition(".")[0] for tensor in inside}
        return next(number for number in count() if str(number) not in found)

    @property
    def largest_dimension(self) -> int:
        return max((size for tensor in self._tensors.values() for size in tensor.shape), default=0)

    def longer_name(self, part: str) -> str | None:
        """Return the first tensor whose name has `part` after a prefix."""
        return min((tensor for tensor in self._tensors if f".{part}" in tensor), default=None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        ValueError if the tensor is missing or holds no floats.
        """
        matrix = self._matrix_of(name)
        return self._floats(name).shape if matrix is None else (matrix.fan_out, matrix.fan_in)

    def require(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError unless a tensor has this shape."""
        found = self.shape(name)
        if found != tuple(shape):
            file = self._tensors[name].file if name in self._tensors else self.where
            raise ValueError(
                f"{file}: tensor {name!r} has shape {list(found)}, but by the config it is {list(shape)}"
            )

    def read(self, name: str) -> np.ndarray:
        """Read one tensor in its stored type, the weight of a quantised layer in fp32."""
        matrix = self._matrix_of(name)
        return self._floats(name).read() if matrix is None else matrix.dequantized().T

    def read_strips(self, name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Read the rows of a matrix in strips, converted to a type."""
        if self._matrix_of(name) is not None:
            yield from strips(self.read(name), dtype)
            return
        tensor = self._floats(name)
        rows = rows_per_strip(tensor.shape, dtype)
        for start in range(0, tensor.shape[0], rows):
            yield tensor.read(start, start + rows).astype(dtype, copy=False)

    def _matrix_of(self, name: str) -> QuantizedMatrix | None:
        module, _, tensor = name.rpartition(".")
        return self.matrix(module) if tensor == "weight" else None

    def _floats(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            longer = sorted(found for found in self._tensors if found.endswith(f".{name}"))
            there = f", which has {longer[0]!r}" if longer else ""
            raise ValueError(f"{self.where}: tensor {name!r} is missing{there}")
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}; supported: {', '.join(FLOATS)}"
            )
        self._used.add(tensor.name)
        return tensor


def add_file(checkpoint: Path, file: str, names: Iterable[str]) -> None:
    """List tensors of one more file in a checkpoint's index, which may be missing."""
    path = checkpoint / INDEX
    if path.is_file():
        index = read_json(path)
    else:
        index = {"metadata": {}, "weight_map": dict.fromkeys(read_header(checkpoint / FILE), FILE)}
    index["weight_map"] |= dict.fromkeys(names, file)
    path.write_text(json.dumps(index, indent=1))


def _weight_map(index: Path) -> dict[str, str]:
    """Read the file of each tensor from the index of a sharded checkpoint."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is missing or empty, expected the file of each tensor")
    for name, file in weight_map.items():
        if not is_file_name(file):
            entry = f"{printable(name)} {quoted(file)}"
            raise ValueError(f"{index}: weight_map: {entry}: expected the name of a file beside it")
    return weight_map


def _other_format(directory: Path) -> str:
    for pattern, advice in OTHER_FORMATS.items():
        files = sorted(directory.glob(pattern))
        if files:
            return f"; {files[0].name} has {advice}"
    return ""
