# SPDX-License-Identifier: Apache-2.0
"""SharedRuntime: one runtime for several clients, such as the nodes of a fleet."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from edgellm_ros.echo import quoted
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.number_checks import check_number
from edgellm_ros.runtime.adapters.lora import BASE, canonical_name
from edgellm_ros.runtime.answerer import Answerer
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.scheduling.shares import MAX_WEIGHT, MIN_WEIGHT, Share


class SharedRuntime:
    """A runtime that is open until the last of its shares is closed; thread-safe.

    Adapters that several shares load under one name are loaded once, and are removed with the last.
    """

    def __init__(self, runtime: LLMInferenceRuntime) -> None:
        """Take over a runtime, which only its shares use from now on."""
        self.runtime = runtime
        self.shares: list[RuntimeShare] = []
        self.built_in = frozenset(runtime.lora_names())
        self.lock = threading.RLock()  # of what the shares have in common
        self._was_lost = False  # the device, for a share that is closed
        self._sources: dict[str, Path] = {}  # of adapters that shares have loaded

    @property
    def is_lost(self) -> bool:
        """Whether the device was lost: requests fail until the runtime is opened again."""
        return self._was_lost or any(share.lost_device for share in self.shares)

    def share(self, weight: float = 1.0, rows: int | None = None) -> RuntimeShare:
        """Return a new share.

        weight: the share's part of the work, while several shares have requests, is proportional to it; from
        0.01 to 100. rows: how many of its requests may run at once without waiting for a row, for
        information; None = all rows of the batch. ValueError outside of these ranges; EngineError once the
        runtime is closed.
        """
        check_number("weight", weight, MIN_WEIGHT, MAX_WEIGHT)
        if rows is not None:
            check_number("rows", rows, 1, self.runtime.rows)
        with self.lock:
            if self.runtime.closed:
                raise EngineError("the runtime is closed")
            self.shares.append(RuntimeShare(self, weight, rows))
            return self.shares[-1]

    def add_lora(self, name: str, directory: Path) -> None:
        """Load an adapter for one more share. Raises the errors of `add_lora`."""
        with self.lock:
            source = self._sources.get(name)
            if source is None:
                self.runtime.add_lora(name, directory)
                self._sources[name] = directory
            elif source.resolve() != directory.resolve():
                raise ValueError(
                    f"adapter {quoted(name)} is loaded from {quoted(str(source))} for another share: choose "
                    "another name"
                )

    def remove_loras(self, names: Set[str]) -> None:
        """Remove those of these adapters that no share has any more."""
        with self.lock:
            kept = {name for share in self.shares for name in share.own_loras}
            gone = [name for name in names - kept if self._sources.pop(name, None) is not None]
            if gone:  # a policy has none
                self.runtime.remove_lora(*gone)

    def close(self, share: RuntimeShare) -> None:
        """Remove a share with its adapters and saved prompts.

        The runtime is closed after the last share.
        """
        with self.lock:
            if share not in self.shares:
                return
            self.shares.remove(share)
            self._was_lost |= share.lost_device
            if not self.shares:
                self.runtime.close()
                return
            saved = {prompt for other in self.shares for prompt in other.saved_prompts}
            for prompt, lora in share.saved_prompts - saved:
                with suppress(ValueError, EngineError):  # an error has cleared the prefix cache
                    self.runtime.release_system_prompt_kv_cache(prompt, lora or BASE)
            self.remove_loras(share.own_loras)


class RuntimeShare(LLMInferenceRuntime):
    """A client's share of a runtime, which for the client is a runtime of its own.

    A share has its own active adapter and LM head, adapters, saved system prompts and noise seed. Engines,
    prefix cache, LM heads and metrics are those of all shares. `close` closes the share, after its requests
    have ended.
    """

    def __init__(self, shared: SharedRuntime, weight: float, rows: int | None) -> None:
        runtime = shared.runtime
        self.config, self.parts = runtime.config, runtime.parts
        self._metrics, self._lock, self._scheduler = runtime._metrics, runtime._lock, runtime._scheduler
        self._noise_seed = 0
        self._share = Share(weight)
        self._rows = rows
        self._shared = shared
        self._active_lora = self._active_lm_head = ""
        self._is_closed = False
        self.own_loras: frozenset[str] = frozenset()  # besides those of the engine directory
        self.saved_prompts: set[tuple[str, str]] = set()  # with the names of their adapters

    @property
    def _answerer(self) -> Answerer:
        self._check_open()
        return self._shared.runtime._answerer

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("the runtime is closed")

    @property
    def rows(self) -> int:
        """Rows of the batch that the share may count on."""
        return self._rows or super().rows

    @property
    def lost_device(self) -> bool:
        """Whether a submitted request has failed because the device was lost."""
        return self._share.lost_device

    @property
    def closed(self) -> bool:
        return self._is_closed or self._shared.runtime.closed

    def close(self) -> None:
        """Close the share, and the runtime with the last one; may be called twice."""
        self._is_closed = True
        self._shared.close(self)

    def _completed(self, request: LLMGenerationRequest) -> LLMGenerationRequest:
        self._check_open()
        if not isinstance(request, LLMGenerationRequest):
            return request  # refused later
        head = request.lm_head or self._active_lm_head or BASE
        return dataclasses.replace(request, lora=self._adapter(request.lora), lm_head=head)

    def _adapter(self, name: str) -> str:
        """Return an adapter's name for the runtime; "" is the active one. ValueError."""
        return self._check_own(name or self._active_lora) or BASE

    def _check_own(self, name: str) -> str:
        """Return the canonical name of an adapter of this share, else ValueError."""
        name = canonical_name(name)
        if name and name not in (names := self.lora_names()):
            raise ValueError(f"unknown LoRA adapter {quoted(name)}; loaded: {', '.join(names) or 'none'}")
        return name

    @property
    def active_lora(self) -> str:
        """Name of the adapter for requests that name none; "" is the base model."""
        return self._active_lora

    def switch_lora_weights(self, name: str) -> None:
        """Set the active adapter of this share; "" or "base" is the base model."""
        if self.config.policy is not None:
            self._answerer.loras.switch(name)  # refuses adapters
        self._active_lora = self._check_own(name)

    def lora_names(self) -> list[str]:
        """Return the adapters of the engine directory and of this share, sorted."""
        own = self._shared.built_in | self.own_loras
        return [name for name in self._answerer.loras.names() if name in own]

    def add_lora(self, name: str, directory: str | Path) -> None:
        """Load an adapter for this share; see `LLMInferenceRuntime.add_lora`.

        Another share may have it under the same name, from the same place.
        """
        if name in self.lora_names():
            raise ValueError(f"adapter {quoted(name)} is loaded already, remove it first")
        with self._shared.lock:
            self._shared.add_lora(name, Path(directory))
            self.own_loras |= {name}

    def remove_lora(self, *names: str) -> None:
        """Remove adapters of this share, all or none.

        ValueError for the active adapter, those of the engine directory and unknown names.
        """
        for name in names:
            if not self._check_own(name):
                raise ValueError("the base model cannot be removed")
            if name in self._shared.built_in:
                raise ValueError(f"adapter {quoted(name)} is of the engine directory, which all shares use")
            if name == self._active_lora:
                raise ValueError(f"adapter {quoted(name)} is active: switch to another before it is removed")
        with self._shared.lock:
            self.own_loras -= set(names)  # a new set: other threads may read the old one
            self.saved_prompts = {each for each in self.saved_prompts if each[1] not in names}
            self._shared.remove_loras(set(names))

    @property
    def active_lm_head(self) -> str:
        """Name of the LM head for requests that name none; "" is the base head."""
        return self._active_lm_head

    def switch_lm_head(self, name: str) -> None:
        """Set the active LM head of this share; "" or "base" is the base head."""
        name = canonical_name(name)
        if name and name not in (names := self.lm_head_names()):
            raise ValueError(f"unknown LM head {quoted(name)}; added: {', '.join(names) or 'none'}")
        self._active_lm_head = name

    def gen_and_save_system_prompt_kv_cache(self, system_prompt: str, lora: str = "") -> int:
        """Save a system prompt until all shares that saved it have released it.

        Arguments, result and errors are those of `LLMInferenceRuntime`. A share that is closed releases its
        prompts.
        """
        name = self._adapter(lora)
        tokens = super().gen_and_save_system_prompt_kv_cache(system_prompt, name)
        with self._shared.lock:
            self.saved_prompts.add((system_prompt, canonical_name(name)))
        return tokens

    def release_system_prompt_kv_cache(self, system_prompt: str, lora: str = "") -> None:
        """Release a system prompt that this share has saved; ValueError for another one."""
        name = self._adapter(lora)
        prompt = system_prompt, canonical_name(name)
        with self._shared.lock:
            is_saved = prompt in self.saved_prompts
            self.saved_prompts.discard(prompt)
            if is_saved and any(prompt in other.saved_prompts for other in self._shared.shares):
                return
            if not is_saved:
                whose = f"the adapter {quoted(prompt[1])}" if prompt[1] else "the base model"
                raise ValueError(f"the system prompt {quoted(system_prompt)} is not saved for {whose}")
            super().release_system_prompt_kv_cache(system_prompt, name)
