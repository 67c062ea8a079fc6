# SPDX-License-Identifier: Apache-2.0
"""Names of models: the engine's own, and those of its LoRA adapters."""

from __future__ import annotations

import time
from typing import Any, Protocol

from edgellm_ros.echo import quoted
from edgellm_ros.engine_directory.adapters.adapter_folder import BASE
from edgellm_ros.serving.openai.errors import ApiError


class HasAdapters(Protocol):
    """A runtime, as far as its adapters go."""

    def lora_names(self) -> list[str]: ...


class Models:
    """The models that clients may name; `base`: the name of the engine's own."""

    def __init__(self, runtime: HasAdapters, base: str) -> None:
        self._runtime = runtime
        self.base = base
        self._created = int(time.time())

    def adapter(self, model: str) -> str:
        """Return the adapter that a request's `lora` names.

        ApiError 404 for an unknown model.
        """
        if model == self.base:
            return BASE
        if model in self._runtime.lora_names():
            return model
        names = ", ".join(quoted(name) for name in self._names())
        raise ApiError(
            404, f"model: {quoted(model)} does not exist; there are {names}", "model", "model_not_found"
        )

    def listed(self) -> dict[str, Any]:
        """Return all models as OpenAI's list."""
        return {"object": "list", "data": [self._entry(name) for name in self._names()]}

    def entry(self, model: str) -> dict[str, Any]:
        """Return one model. ApiError 404 for an unknown one."""
        self.adapter(model)
        return self._entry(model)

    def _names(self) -> list[str]:
        return [self.base, *(name for name in self._runtime.lora_names() if name != self.base)]

    def _entry(self, name: str) -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": "edgellm"}
        return entry if name == self.base else {**entry, "root": self.base, "parent": self.base}
