# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a language model's engine: named sets of tensors to bind to its inputs.

An adapter is loaded once. To answer with it costs a binding, which is why the requests of one batch may each
name their own, and why a switch is only a name.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.lora_adapters import (
    BASE,
    FOLDER,
    INPUT,
    adapter_targets,
    canonical_name,
    check_name,
    find_adapter,
    find_adapters,
)
from edgellm_ros.engine_directory.peft_adapter import PeftAdapter, read_peft_adapter

__all__ = [
    "BASE",
    "FOLDER",
    "canonical_name",
    "find_adapter",
    "find_adapters",
]  # for users of this module too


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """What one adapter binds: `tensors` has every adapter input of the engine, at this rank.

    `digest` is the SHA-256 of the contents: two adapters with the same one compute the same. The base model
    is an adapter without a name, of the lowest rank, with the digest "".
    """

    name: str
    rank: int
    digest: str
    tensors: Mapping[str, Tensor]

    @property
    def key(self) -> str:
        """Tells apart what was computed with different adapters: name and contents; "" for the base model."""
        return f"{self.name}:{self.digest}" if self.name else ""


class LoraAdapters:
    """The adapters of one engine, by name, and which of them is active: used by requests that name none.

    Where the engine takes no empty tensors, the base model is an adapter of rank 1 that is zero. May be
    called from any thread, also while a batch runs: a batch keeps the adapters that it began with.
    """

    def __init__(
        self, device: Device, bindings: Iterable[Binding], max_rank: int, supports_empty_tensors: bool = True
    ) -> None:
        self._device = device
        self._max_rank = max_rank
        self._inputs = {binding.name: binding for binding in bindings if INPUT.fullmatch(binding.name)}
        self.targets = adapter_targets({name: binding.shape for name, binding in self._inputs.items()})
        # Stands in for the modules that an adapter leaves alone.
        widest = max((size for sizes in self.targets.values() for size in sizes), default=0)
        dtype = next((binding.dtype for binding in self._inputs.values()), np.dtype(np.float32))
        self._zeros = device.zeros((max(1, widest * max_rank),), dtype)
        self._lock = threading.Lock()
        rank = 0 if supports_empty_tensors else 1
        self.base = LoraAdapter("", rank, "", self._bind(PeftAdapter(rank, {})))
        self._adapters = {"": self.base}
        self._active = ""

    @property
    def active(self) -> str:
        """The active adapter; "" is the base model."""
        return self._active

    def names(self) -> list[str]:
        """Adapters that are loaded, sorted, the base model left out."""
        with self._lock:
            return sorted(name for name in self._adapters if name)

    def loaded(self) -> list[LoraAdapter]:
        """The base model and all adapters."""
        with self._lock:
            return list(self._adapters.values())

    def get(self, name: str) -> LoraAdapter:
        """The adapter of this name, the active one for "", the base model for BASE.

        ValueError, with the names there are.
        """
        with self._lock:
            return self._adapters[self._check_loaded(name) if name else self._active]

    def add(self, name: str, directory: str | Path) -> LoraAdapter:
        """Load a PEFT adapter. ValueError or FileNotFoundError; then everything is as before."""
        check_name(name)
        if not self.targets:
            raise ValueError(
                f"adapter {name!r}: this engine takes no adapters, export it with --max-lora-rank"
            )
        self._check_new(name)
        peft = read_peft_adapter(directory, self.targets, self._max_rank)
        tensors = self._bind(peft)
        adapter = LoraAdapter(name, peft.rank, self._digest(tensors), tensors)
        with self._lock:
            self._check_new(name)
            self._adapters[name] = adapter
        return adapter

    def remove(self, *names: str) -> list[LoraAdapter]:
        """Forget adapters, all or none; a batch that runs with one ends with it. Returns what was removed.

        ValueError for the active one and for unknown ones.
        """
        with self._lock:
            for name in names:
                if not canonical_name(name):
                    raise ValueError("the base model cannot be removed")
                self._check_loaded(name)
                if name == self._active:
                    raise ValueError(f"adapter {name!r} is active: switch to another before it is removed")
            return [self._adapters.pop(name) for name in dict.fromkeys(names)]

    def switch(self, name: str) -> None:
        """Make an adapter the active one; "" or BASE is the base model. ValueError, and the old one stays
        active.
        """
        with self._lock:
            self._active = self._check_loaded(name)

    def _check_loaded(self, name: str) -> str:
        """The adapter's canonical name. ValueError for an unknown one."""
        name = canonical_name(name)
        if name not in self._adapters:
            loaded = ", ".join(sorted(filter(None, self._adapters))) or "none"
            raise ValueError(f"unknown LoRA adapter {name!r}; loaded: {loaded}")
        return name

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise ValueError(f"adapter {name!r} is loaded already, remove it first")

    def _bind(self, peft: PeftAdapter) -> dict[str, Tensor]:
        """Tensors for every adapter input. Modules of a smaller rank are filled up with zeros: 0 is added."""
        tensors = {}
        for name, binding in self._inputs.items():
            module, matrix = INPUT.fullmatch(name).groups()  # type: ignore[union-attr]
            shape = tuple(dim if isinstance(dim, int) else peft.rank for dim in binding.shape)
            if module not in peft.weights:
                tensors[name] = self._zeros.view(*shape)
                continue
            values = np.zeros(shape, np.float32)
            given = peft.weights[module]["AB".index(matrix)]
            values[tuple(slice(size) for size in given.shape)] = given
            with np.errstate(over="ignore"):
                values = values.astype(binding.dtype)
            if not np.isfinite(values).all():
                raise ValueError(f"lora_{matrix} of {module} exceeds the range of {binding.dtype}")
            tensors[name] = self._device.empty(shape, binding.dtype)
            self._device.upload(tensors[name], values)
        return tensors

    def _digest(self, tensors: Mapping[str, Tensor]) -> str:
        digest = hashlib.sha256()
        for name in sorted(tensors):
            array = self._device.download(tensors[name])
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()
