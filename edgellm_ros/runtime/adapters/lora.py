# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a language model: named tensors for its engine's LoRA inputs.

An adapter is loaded once, and a run with an adapter binds the adapter's tensors. So each request of a batch
may name its own adapter, and a switch of the active adapter changes only a name.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.adapters.adapter_folder import (
    BASE,
    FOLDER,
    canonical_name,
    check_name,
    find_adapter,
    find_adapters,
)
from edgellm_ros.engine_directory.adapters.lora_inputs import (
    LoraInput,
    is_lora_input,
    lora_inputs,
    lora_targets,
)
from edgellm_ros.engine_directory.adapters.lora_scales import LoraScales
from edgellm_ros.engine_directory.adapters.peft_adapter import PeftAdapter, read_adapter

__all__ = [
    "BASE",
    "FOLDER",
    "LoraAdapter",
    "LoraAdapters",
    "canonical_name",
    "find_adapter",
    "find_adapters",
]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """One adapter, ready to be bound.

    The base model is an adapter without a name, of the lowest rank.
    """

    name: str  # "" is the base model
    rank: int
    digest: str  # SHA-256 of the contents: equal digests give equal results; "" for the base model
    tensors: Mapping[str, Tensor]  # for every LoRA input of the engine, at this rank
    changed: frozenset[str] = frozenset()  # the inputs A and B that are not zeros
    lm_head: str = ""  # name of the LM head of its runs (engines/lm_heads.py); "" = the base head
    head: Tensor | None = None  # its weights [H,V]; None = those of the base head

    @property
    def key(self) -> str:
        """Cache key of this adapter's results: name and digest; "" for the base model."""
        return f"{self.name}:{self.digest}" if self.name else ""


class LoraAdapters:
    """The adapters of one engine by name, and the active one.

    Requests that name no adapter use the active one. All methods may be called from any thread, also while a
    batch runs: the batch keeps the adapters with which it began. If the engine does not support empty
    tensors, the base model is an adapter of rank 1 with zeros. scales: factors of adapters for this engine.
    """

    def __init__(
        self,
        device: Device,
        bindings: Iterable[Binding],
        max_rank: int,
        supports_empty_tensors: bool = True,
        scales: LoraScales | None = None,
    ) -> None:
        self._device = device
        self._scales = scales or LoraScales()
        self._max_rank = max_rank
        bound = {binding.name: binding for binding in bindings if is_lora_input(binding.name)}
        self._inputs = lora_inputs({name: binding.shape for name, binding in bound.items()})
        self.targets = lora_targets(self._inputs)
        self._dtype = next((binding.dtype for binding in bound.values()), np.dtype(np.float32))
        # Bound to all inputs whose layers an adapter does not change.
        sizes = [math.prod(shape) for entry in self._inputs for shape in entry.shapes(max(1, max_rank))]
        self._zeros = device.zeros((max(sizes, default=1),), self._dtype)
        self._lock = threading.Lock()
        rank = 0 if supports_empty_tensors else 1
        self.base = LoraAdapter("", rank, "", self._upload({}, rank))
        self._adapters = {"": self.base}
        self._active = ""

    @property
    def inputs(self) -> list[LoraInput]:
        """The engine's LoRA inputs."""
        return self._inputs

    @property
    def active(self) -> str:
        """Name of the active adapter; "" is the base model."""
        return self._active

    def names(self) -> list[str]:
        """Return the names of the loaded adapters without the base model, sorted."""
        with self._lock:
            return sorted(name for name in self._adapters if name)

    def loaded(self) -> list[LoraAdapter]:
        """Return the base model and all adapters."""
        with self._lock:
            return list(self._adapters.values())

    def get(self, name: str) -> LoraAdapter:
        """Find an adapter by name; "" is the active one, BASE the base model.

        ValueError, which lists the loaded adapters, for an unknown name.
        """
        with self._lock:
            return self._adapters[self._check_loaded(name) if name else self._active]

    def add(self, name: str, directory: str | Path) -> LoraAdapter:
        """Load a PEFT adapter, a directory or a `.safetensors` file, under a new name.

        Reads, checks and hashes the files on the host, then queues one upload per input; reads nothing back.
        Blocks while it reads the files, so do not call it from a callback that must not block.
        ValueError or FileNotFoundError if the adapter cannot be loaded: then nothing has changed.
        """
        check_name(name)
        if not self.targets:
            raise ValueError(
                f"adapter {quoted(name)}: this engine has no LoRA inputs, export it with --max-lora-rank"
            )
        self._check_new(name)
        peft = self._scales.apply(read_adapter(directory, self.targets, self._max_rank))
        arrays = self._pack(peft)
        tensors = self._upload(arrays, peft.rank)
        adapter = LoraAdapter(name, peft.rank, _digest(arrays), tensors, frozenset(arrays))
        with self._lock:
            self._check_new(name)
            self._adapters[name] = adapter
        return adapter

    def remove(self, *names: str) -> list[LoraAdapter]:
        """Remove adapters, all or none, and return them.

        A running batch keeps the adapters with which it began. ValueError for the active adapter, the base
        model and unknown names.
        """
        with self._lock:
            for name in names:
                if not canonical_name(name):
                    raise ValueError("the base model cannot be removed")
                self._check_loaded(name)
                if name == self._active:
                    raise ValueError(
                        f"adapter {quoted(name)} is active: switch to another before it is removed"
                    )
            return [self._adapters.pop(name) for name in dict.fromkeys(names)]

    def switch(self, name: str) -> None:
        """Set the active adapter; "" or BASE is the base model.

        ValueError for an unknown name: then the old adapter stays active.
        """
        with self._lock:
            self._active = self._check_loaded(name)

    def _check_loaded(self, name: str) -> str:
        """Return the adapter's canonical name. ValueError for an unknown name."""
        name = canonical_name(name)
        if name not in self._adapters:
            loaded = ", ".join(sorted(filter(None, self._adapters))) or "none"
            raise ValueError(f"unknown LoRA adapter {quoted(name)}; loaded: {loaded}")
        return name

    def _check_new(self, name: str) -> None:
        if name in self._adapters:
            raise ValueError(f"adapter {quoted(name)} is loaded already, remove it first")

    def _pack(self, peft: PeftAdapter) -> dict[str, np.ndarray]:
        """Convert an adapter to arrays for the LoRA inputs, in the engine's type.

        Only the inputs whose layers the adapter changes get an array. ValueError for values outside the range
        of the type.
        """
        arrays = {}
        for entry in self._inputs:
            for module in entry.modules:
                for matrix, values in zip("AB", peft.weights.get(module, ()), strict=False):
                    if not np.isfinite(self._cast(values)).all():
                        raise ValueError(f"lora_{matrix} of {module} exceeds the range of {self._dtype}")
            if entry.is_adapted(peft.weights):
                a, b = entry.pack(peft.weights, peft.rank)
                arrays[entry.a_name], arrays[entry.b_name] = self._cast(a), self._cast(b)
        return arrays

    def _cast(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return values.astype(self._dtype)

    def _upload(self, arrays: Mapping[str, np.ndarray], rank: int) -> dict[str, Tensor]:
        """Upload the arrays; return a tensor for every LoRA input.

        Inputs without an array get zeros.
        """
        tensors = {}
        for entry in self._inputs:
            for name, shape in zip((entry.a_name, entry.b_name), entry.shapes(rank), strict=True):
                if name in arrays:
                    tensors[name] = self._device.empty(shape, self._dtype)
                    self._device.upload(tensors[name], arrays[name])
                else:
                    tensors[name] = self._zeros.view(*shape)
        return tensors


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
