# SPDX-License-Identifier: Apache-2.0
"""LM heads of a language model whose engine has the LM head as an input.

Several heads are on the device, and a run binds one. So each request of a batch may name its own head, and a
switch of the active head changes only a name. A run takes its head with its adapter: `apply` returns the
adapter with the head.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.borrowing import borrow, is_array, is_on_gpu, on_host
from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.engine_directory.adapters.adapter_folder import BASE, NAME, canonical_name
from edgellm_ros.runtime.adapters.lora import LoraAdapter


class LMHeads:
    """The LM heads [H,V] of one engine by name, and the active one.

    Requests that name no head use the active one; BASE is the head that the engine directory has. All methods
    may be called from any thread, also while a batch runs.

    - binding: the engine's input; None = it has none
    - engine: its name in errors
    """

    def __init__(self, device: Device, binding: Binding | None, engine: str) -> None:
        self._device = device
        self._binding = binding
        self._engine = engine
        self._lock = threading.Lock()
        self._heads: dict[str, Tensor] = {}  # without the base head
        self._applied: dict[tuple[LoraAdapter, str], LoraAdapter] = {}
        self._active = ""

    @property
    def active(self) -> str:
        """Name of the active head; "" is the base head."""
        return self._active

    def names(self) -> list[str]:
        """Return the names of the added heads without the base head, sorted."""
        with self._lock:
            return sorted(self._heads)

    def add(self, name: str, weights: object) -> None:
        """Add a head under a new name; see `LLMInferenceRuntime.add_lm_head`."""
        if not NAME.fullmatch(name) or name == BASE:
            raise ValueError(
                f"an LM head's name must consist of letters, digits, '_', '.' and '-' and not be {BASE!r}, "
                f"got {quoted(name)}"
            )
        self._check_new(name)
        head = self.checked(weights)
        if isinstance(head, np.ndarray):
            head = on_device(self._device, head)
        with self._lock:
            self._check_new(name)
            self._heads[name] = head

    def remove(self, name: str) -> list[LoraAdapter]:
        """Remove a head; return its adapters, whose recorded steps must be dropped.

        ValueError for the active head, the base head and an unknown name.
        """
        with self._lock:
            if not canonical_name(name):
                raise ValueError("the base LM head cannot be removed")
            self._check_added(name)
            if name == self._active:
                raise ValueError(f"LM head {quoted(name)} is active: switch to another before it is removed")
            del self._heads[name]
            return [self._applied.pop(key) for key in list(self._applied) if key[1] == name]

    def switch(self, name: str) -> None:
        """Set the active head; "" or BASE is the base head.

        ValueError for an unknown name.
        """
        with self._lock:
            self._active = self._check_added(name)

    def apply(self, adapter: LoraAdapter, name: str = "") -> LoraAdapter:
        """Return an adapter whose runs use a head.

        "" is the active head, BASE the base head. Equal arguments give one object. ValueError for an unknown
        name.
        """
        with self._lock:
            name = self._check_added(name) if name else self._active
            if not name:
                return adapter
            key = adapter, name
            if key not in self._applied:
                self._applied[key] = dataclasses.replace(adapter, lm_head=name, head=self._heads[name])
            return self._applied[key]

    def drop(self, adapter: LoraAdapter) -> list[LoraAdapter]:
        """Forget a removed adapter; return it with each head that was applied to it."""
        with self._lock:
            return [self._applied.pop(key) for key in list(self._applied) if key[0] is adapter]

    def checked(self, weights: object) -> Tensor | np.ndarray:
        """Return weights [H,V], checked.

        An array on the GPU becomes a tensor, another one an array of the engine's type. EngineError for
        another shape, and on the GPU for another type.
        """
        binding = self._binding
        if binding is None:
            raise EngineError(f"{self._engine}: no input for an LM head (export with lm_head_input)")
        if not is_array(weights):
            raise EngineError(f"an LM head must be an array, got {type(weights).__name__}")
        try:
            found = borrow(self._device, weights) if is_on_gpu(weights) else on_host(weights)
        except ValueError as error:
            raise EngineError(f"{self._engine}: {binding.name}: {error}") from None
        if found.shape != binding.shape:
            raise EngineError(
                f"{self._engine}: {binding.name} must be {list(binding.shape)}, got {list(found.shape)}"
            )
        if isinstance(found, Tensor):
            if found.dtype != binding.dtype:
                raise EngineError(
                    f"{self._engine}: {binding.name} must be {binding.dtype} on the device, got {found.dtype}"
                )
            return found
        return found.astype(binding.dtype, copy=False)

    def _check_added(self, name: str) -> str:
        """Return the head's canonical name. ValueError for an unknown name."""
        name = canonical_name(name)
        if name and name not in self._heads:
            added = ", ".join(sorted(self._heads)) or "none"
            raise ValueError(f"unknown LM head {quoted(name)}; added: {added}")
        return name

    def _check_new(self, name: str) -> None:
        if name in self._heads:
            raise ValueError(f"LM head {quoted(name)} is there already, remove it first")


def same_head(adapters: Sequence[LoraAdapter]) -> bool:
    """Return whether all rows of a run have one LM head."""
    return all(adapter.head is adapters[0].head for adapter in adapters)
