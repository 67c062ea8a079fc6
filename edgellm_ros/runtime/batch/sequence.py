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
    """State of one request.

    adapter: of the language model; token_ids: the prompt, with placeholders for images and sounds;
    image_grids: rows and columns of tokens of each image; audio_tokens: tokens of each sound; first_row:
    where the rows of its images and, after them, of its sounds begin in the batch's multimodal rows;
    positions [3, S] and rope_delta: see `get_rope_index`; max_tokens: what the request and the cache's room
    allow; speed at the start in m/s; prefix_keys: what its tokens are told apart by, none if prompts are not
    kept; prefix: what earlier prompts have left of this one, of which the first reused_tokens are not
    computed again; generated, logprobs: the answer so far, one entry per token; finish_reason "" as long as
    it goes on.
    """

    request: LLMGenerationRequest
    adapter: LoraAdapter
    token_ids: list[int]
    image_grids: list[tuple[int, int]]
    audio_tokens: list[int]
    first_row: int
    positions: np.ndarray
    rope_delta: int
    max_tokens: int
    stop_token_ids: Collection[int]
    future_start_token_id: int | None
    text: TextStream
    speed: float = 0.0
    noise_seed: int = 0
    prefix_keys: list[Key] = field(default_factory=list)
    prefix: Prefix = field(default_factory=Prefix)
    reused_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str = ""
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
        """The future-start token, if the request wants the trajectories that it announces."""
        return self.future_start_token_id if self.request.action_samples else None

    @property
    def decoding(self) -> bool:
        """Whether the next decode step is for this sequence too.

        After the future-start token one more step writes that token's keys and values, which the action head
        attends to.
        """
        return not self.finish_reason or self._trigger_row_pending

    @property
    def steps_left(self) -> int:
        """Decode steps that it may still need: none once it has ended, else at most so many.

        One more where the last of them draws the future-start token. The KV cache has room for all.
        """
        if self.finish_reason:
            return int(self._trigger_row_pending)
        return self.max_tokens - len(self.generated)

    @property
    def wants_actions_now(self) -> bool:
        """Whether the answer ended with the future-start token, and the request wants trajectories."""
        return (
            self.finish_reason == "stop"
            and self.request.action_samples > 0
            and self.generated[-1:] == [self.future_start_token_id]
        )

    def accept(self, token: int) -> None:
        """Take the token drawn for this sequence, and finish if it is the last."""
        if self._trigger_row_pending:
            self._trigger_row_pending = False  # only the step mattered
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

    def take_logprobs(self, top_ids: Sequence[int], top_values: Sequence[float]) -> None:
        """Keep the most likely tokens, and the drawn token (last of top_ids) if it is not among them."""
        entries = list(zip(top_ids, top_values, strict=True))
        best, drawn = entries[: self.request.logprobs], entries[-1]
        self.logprobs.append(best if drawn in best else [*best, drawn])

    def report(self, stage: str, step: int) -> bool:
        """Tell the client where the request stands; False if it was cancelled, now or before."""
        if self.finish_reason == "cancelled":
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
