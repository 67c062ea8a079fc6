# SPDX-License-Identifier: Apache-2.0
"""GenerationSequence: one request on its way through the runtime."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm_ros.runtime.lora import LoraAdapter
from edgellm_ros.runtime.prefix.prefix_cache import Prefix
from edgellm_ros.runtime.prefix.prefix_key import Key
from edgellm_ros.runtime.prompt.text_stream import TextStream
from edgellm_ros.runtime.request import LLMGenerationRequest, Progress


@dataclass(eq=False)
class GenerationSequence:
    """State of one request."""

    request: LLMGenerationRequest
    adapter: LoraAdapter  # of the language model
    token_ids: list[int]  # of the prompt, with placeholders for images and sounds
    image_grids: list[tuple[int, int]]  # rows and columns of tokens of each image
    audio_tokens: list[int]  # tokens of each sound
    first_row: (
        int  # of its images, then its sounds, among the encoder rows of all that are prefilled together
    )
    positions: np.ndarray  # [3, S] int64, see `get_rope_index`
    rope_delta: int  # the token at index i of the sequence has position i + rope_delta
    max_tokens: int  # what the request and the cache's capacity allow
    stop_token_ids: Collection[int]
    future_start_token_id: int | None
    text: TextStream
    speed: float = 0.0  # at the start, m/s
    noise_seed: int = 0
    prefix_keys: list[Key] = field(default_factory=list)  # of the prompt's tokens; empty = no prefix cache
    prefix: Prefix = field(default_factory=Prefix)  # what the prefix cache has of the prompt
    reused_tokens: int = 0  # of the prefix, that are not computed again
    kv_length: int = 0  # committed KV rows, as far as the host knows
    steps: int = 0  # decode steps that were for this sequence
    generated: list[int] = field(default_factory=list)  # token ids of the answer
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # one entry per token
    finish_reason: str = ""  # empty while the answer goes on
    actions: np.ndarray | None = None
    paths: np.ndarray | None = None
    _trigger_row_pending: bool = False

    @property
    def image_tokens(self) -> list[int]:
        """Tokens of each image."""
        return [height * width for height, width in self.image_grids]

    @property
    def image_row(self) -> int:
        """Row of its first image placeholder."""
        return self.first_row

    @property
    def audio_row(self) -> int:
        """Row of its first audio placeholder."""
        return self.first_row + sum(self.image_tokens)

    @property
    def end_row(self) -> int:
        """The row after its last."""
        return self.audio_row + sum(self.audio_tokens)

    def reused(self, placeholder: int | None) -> int:
        """How many of the reused tokens are this placeholder's."""
        return sum(token == placeholder for token in self.token_ids[: self.reused_tokens])

    @property
    def action_trigger_token(self) -> int | None:
        """Return the token that triggers the action head, None if the request wants no trajectories."""
        return self.future_start_token_id if self.request.action_samples else None

    @property
    def decoding(self) -> bool:
        """Whether the next decode step is for this sequence too.

        After the trigger token one more step writes the KV row of that token, which the action head attends
        to.
        """
        return not self.finish_reason or self._trigger_row_pending

    @property
    def tokens_left(self) -> int:
        """Upper bound on the tokens that the sequence may still take; 0 once finished.

        One more if the last token triggers the action head. The KV cache has room for all.
        """
        if self.finish_reason:
            return int(self._trigger_row_pending)
        return self.max_tokens - len(self.generated)

    @property
    def wants_actions_now(self) -> bool:
        """Whether the answer ended with the trigger token and trajectories are wanted."""
        return (
            self.finish_reason == "stop"
            and self.request.action_samples > 0
            and self.generated[-1:] == [self.future_start_token_id]
        )

    @property
    def is_cancelled(self) -> bool:
        return self.finish_reason == "cancelled"

    def accept(self, token: int) -> None:
        """Take the next token, and finish if it is the last."""
        if self._trigger_row_pending:
            self._trigger_row_pending = False  # the step was for the KV row of the trigger token
            return
        self.generated.append(token)
        if token in self.stop_token_ids:
            self._finish("stop")
            self._trigger_row_pending = self.wants_actions_now
            return
        self.text.push(token)
        if self.text.stopped:
            self._finish("stop")
        elif len(self.generated) >= self.max_tokens:
            self._finish("length")

    def add_logprobs(self, top_ids: Sequence[int], top_values: Sequence[float]) -> None:
        """Keep the likeliest tokens, and the sampled token (last of top_ids) if it is not among them."""
        entries = list(zip(top_ids, top_values, strict=True))
        best, sampled = entries[: self.request.logprobs], entries[-1]
        self.logprobs.append(best if sampled in best else [*best, sampled])

    def report(self, stage: str, step: int) -> bool:
        """Tell the client where the request stands; return whether it goes on.

        A request whose `cancel` is set is finished here.
        """
        if self.is_cancelled:
            return False
        if self.request.on_progress is not None:
            text = self.text.text if self.finish_reason else self.text.visible
            self.request.on_progress(Progress(stage, text, len(self.generated), step))
        cancel = self.request.cancel
        if cancel is not None and cancel.is_set() and self._has_more_to_do:
            self._finish("cancelled")
            return False
        return True

    @property
    def _has_more_to_do(self) -> bool:
        return self.decoding or (self.wants_actions_now and self.actions is None)

    def _finish(self, reason: str) -> None:
        if not self.finish_reason:
            self.text.finish()
        self.finish_reason = reason
        self._trigger_row_pending = False
