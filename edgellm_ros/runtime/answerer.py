# SPDX-License-Identifier: Apache-2.0
"""What an opened engine directory answers with: a language model or a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine_directory.adapters.adapter_folder import BASE
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse


class Alternatives(Protocol):
    """Adapters or LM heads by name, one of which requests without a name use."""

    @property
    def active(self) -> str:
        """Name of the active one; "" is the base model's."""

    def names(self) -> list[str]:
        """Return the names, sorted, without the base model's."""

    def switch(self, name: str) -> None:
        """Set the active one."""


class Answerer(Protocol):
    """Answers requests; not thread-safe."""

    @property
    def loras(self) -> Alternatives:
        """The adapters."""

    @property
    def lm_heads(self) -> Alternatives:
        """The LM heads."""

    def answer(
        self,
        requests: Sequence[LLMGenerationRequest],
        noise_seed: int,
        output_thinker_embeddings: bool = False,
    ) -> list[LLMGenerationResponse]:
        """Answer requests.

        Arguments and errors are those of `LLMInferenceRuntime.handle_request`.
        """

    def prepare_one(self, request: LLMGenerationRequest, noise_seed: int) -> Any:
        """Prepare a request that is answered later, from any thread. ValueError."""

    def answer_one(self, sequence: Any) -> LLMGenerationResponse:
        """Answer a request that `prepare_one` has prepared."""

    def capture_decoding_cuda_graph(self) -> bool:
        """Record what repeats; return whether the device supports that."""


class OnlyBase:
    """The alternatives of a model that has none.

    reason: of the EngineError for a name.
    """

    active = ""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def names(self) -> list[str]:
        return []

    def switch(self, name: str) -> None:
        if name not in ("", BASE):
            raise EngineError(self._reason)
