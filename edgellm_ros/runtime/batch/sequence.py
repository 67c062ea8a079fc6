# SPDX-License-Identifier: Apache-2.0
"""GenerationSequence: the state of one request while it is executed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm_ros.diffusion.sampling import Sampling
from edgellm_ros.kernels import EXCLUDED
from edgellm_ros.runtime.adapters.lora import LoraAdapter
from edgellm_ros.runtime.grammar.grammar import GrammarMatcher
from edgellm_ros.runtime.prefix.prefix_cache import Prefix
from edgellm_ros.runtime.prefix.prefix_key import Key
from edgellm_ros.runtime.prompt.video_layout import VideoLayout
from edgellm_ros.runtime.request import LLMGenerationRequest, Progress, SamplingParams
from edgellm_ros.runtime.text.text_stream import TextStream


@dataclass(eq=False)
class GenerationSequence:
    """Prompt, decoding state and answer of one request."""

    request: LLMGenerationRequest
    sampling: SamplingParams  # of the request, with the checkpoint's defaults
    adapter: LoraAdapter
    token_ids: list[int]  # of the prompt, with placeholders for images, videos and sounds
    image_grids: list[tuple[int, int]]  # rows and columns of tokens of each image
    audio_tokens: list[int]  # number of tokens of each sound, those of videos included
    first_row: int  # first of its encoder rows (images, videos, sounds) among all encoder rows of the batch
    positions: np.ndarray  # of the prompt's tokens [3, S] float32, see `get_rope_index`
    rope_delta: float  # the token at index i of the sequence has position i + rope_delta
    max_tokens: int  # limit of the answer: from the request and the capacity of the KV cache
    stop_token_ids: Collection[int]
    future_start_token_id: int | None  # the token that triggers the action head; None = no action head
    text: TextStream  # of the answer
    grammar: GrammarMatcher | None = None  # of the answer; None = any text
    request_index: int = 0  # of its request among those that were given together
    videos: list[VideoLayout] = field(default_factory=list)
    encoded_rows: set[int] = field(default_factory=set)  # first rows of what the encoders have computed
    speed: float = 0.0  # of the robot at the start, m/s
    noise_seed: int = 0  # of the trajectories
    prefix_keys: list[Key] = field(default_factory=list)  # of the prompt's tokens; empty = no prefix cache
    prefix: Prefix = field(default_factory=Prefix)  # longest stored prefix of the prompt
    reused_tokens: int = 0  # tokens of the prefix whose KV rows are copied instead of computed
    state_points: list[int] = field(default_factory=list)  # tokens after which the recurrent state is saved
    begins_later_prompts: bool = False  # made to be stored, without an answer
    held: bool = False  # whether steps yield nothing for it, see `Batch`
    kv_length: int = 0  # committed KV rows, without the steps that are still queued
    steps: int = 0  # delivered decode steps, or rounds of drafting
    generated: list[int] = field(default_factory=list)  # token ids of the answer
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # one entry per token
    # [L,H] for each token of the answer, if requested: the states of L layers from which it was sampled
    hidden_states: list[np.ndarray] = field(default_factory=list)
    state_layers: tuple[int, ...] = ()  # the L layers
    finish_reason: str = ""  # "stop", "length" or "cancelled"; empty until finished
    sampling_actions: Sampling | None = None  # of the action head, from its first part on
    actions: np.ndarray | None = None  # [n, T, A], once the action head has run
    paths: np.ndarray | None = None  # [n, T+1, 4]
    _trigger_row_pending: bool = False  # one more step must write the KV row of the trigger token

    @property
    def image_tokens(self) -> list[int]:
        """Number of tokens of each image."""
        return [height * width for height, width in self.image_grids]

    @property
    def image_row(self) -> int:
        """Encoder row of the first image placeholder."""
        return self.first_row

    @property
    def video_row(self) -> int:
        """Encoder row of the first video placeholder."""
        return self.first_row + sum(self.image_tokens)

    @property
    def audio_row(self) -> int:
        """Encoder row of the first audio placeholder."""
        return self.video_row + sum(video.grid.tokens for video in self.videos)

    @property
    def end_row(self) -> int:
        """Encoder row after the sequence's last one."""
        return self.audio_row + sum(self.audio_tokens)

    def placeholders(self, placeholder: int | None, tokens: int) -> int:
        """Count the placeholders of a kind among the first tokens of the prompt."""
        return 0 if placeholder is None else self.token_ids[:tokens].count(placeholder)

    def reused(self, placeholder: int | None) -> int:
        """Count the reused tokens that are this placeholder."""
        return self.placeholders(placeholder, self.reused_tokens)

    @property
    def action_trigger_token(self) -> int | None:
        """Token that triggers the action head; None if the request wants no trajectories."""
        return self.future_start_token_id if self.request.action_samples else None

    @property
    def decoding(self) -> bool:
        """Whether the sequence needs another decode step.

        After the trigger token, one more step writes the KV row of this token: the action head attends to it.
        """
        return not self.finish_reason or self._trigger_row_pending

    @property
    def tokens_left(self) -> int:
        """Upper bound on the remaining tokens; 0 once finished.

        One more if the last token triggers the action head. The KV cache has room for all of them.
        """
        if self.finish_reason:
            return int(self._trigger_row_pending)
        return self.max_tokens - len(self.generated)

    @property
    def used_slots(self) -> int:
        """KV slots of which neither the row nor the position is left for a next token."""
        return self.kv_length + max(math.ceil(self.rope_delta), 0)

    @property
    def wants_actions_now(self) -> bool:
        """Whether the answer ended with the trigger token and trajectories are wanted."""
        return (
            self.finish_reason == "stop"
            and self.request.action_samples > 0
            and self.generated[-1:] == [self.future_start_token_id]
        )

    @property
    def wants_part(self) -> bool:
        """Whether a part of the trajectories is to be sampled next."""
        sampling = self.sampling_actions
        return self.wants_actions_now and not self.decoding and (sampling is None or not sampling.done)

    @property
    def grammar_complete(self) -> bool | None:
        """Whether the answer is complete by its grammar; None without one."""
        if self.sampling.grammar is None:
            return None
        if self.grammar is None:  # cancelled while it was compiled
            return False
        return self.grammar.is_complete(self.text.text if self.text.stopped else None)

    @property
    def states_by_layer(self) -> dict[int, np.ndarray] | None:
        """The hidden states [n,H] of each layer.

        None if not requested, empty without tokens.
        """
        if not self.request.output_hidden_states:
            return None
        if not self.hidden_states:
            return {}
        return dict(zip(self.state_layers, np.stack(self.hidden_states, axis=1), strict=True))

    @property
    def is_cancelled(self) -> bool:
        return self.finish_reason == "cancelled"

    def accept(self, token: int) -> None:
        """Append the next token, and finish if it is the last one."""
        if self._trigger_row_pending:
            self._trigger_row_pending = False  # this step only wrote the KV row of the trigger token
            return
        self.generated.append(token)
        if token in self.stop_token_ids:
            self._finish("stop")
            self._trigger_row_pending = self.wants_actions_now
            return
        if self.grammar is not None:
            self.grammar.accept(token)
        self.text.push(token)
        if self.text.stopped:
            self._finish("stop")
        elif len(self.generated) >= self.max_tokens:
            self._finish("length")

    def add_logprobs(self, top_ids: Sequence[int], top_values: Sequence[float]) -> None:
        """Store the log-probabilities of one token.

        The entry has the requested number of most likely tokens, and the sampled token (last of top_ids) if
        it is not among them. Tokens that the grammar excludes are left out.
        """
        entries = list(zip(top_ids, top_values, strict=True))
        best, sampled = entries[: self.request.logprobs], entries[-1]
        if self.grammar is not None:
            best = [entry for entry in best if entry[1] > EXCLUDED / 2]
        self.logprobs.append(best if sampled in best else [*best, sampled])

    def report(self, stage: str, step: int) -> bool:
        """Report progress to the client; return False if the request is cancelled.

        Finishes the request if its `cancel` is set and work remains.
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
