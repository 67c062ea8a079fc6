# SPDX-License-Identifier: Apache-2.0
"""PromptBuilder: converts a request to the token ids of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.prompt.chat_template import ChatTemplate
from edgellm_ros.runtime.prompt.tokenizer import Tokenizer
from edgellm_ros.runtime.request import LLMGenerationRequest

NO_TOKEN = -1  # an id that occurs in no prompt


class PromptBuilder:
    """Renders the chat template, converts it to ids, and expands its placeholders."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, config: EngineConfig) -> None:
        if tokenizer.size > config.llm.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.size} tokens, the language model {config.llm.vocab_size}"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._image_token = _or_no_token(config.special_tokens.image_token_id)
        self._image_boundaries: tuple[list[int], list[int]] = [], []
        if config.vision is not None and config.vision.adds_image_boundaries:
            tokens = config.special_tokens
            start, end = map(_or_no_token, (tokens.vision_start_token_id, tokens.vision_end_token_id))
            self._image_boundaries = [start], [end]
        self._audio_token = _or_no_token(config.special_tokens.audio_token_id)
        self._history_token = config.action.history_token_id if config.action else NO_TOKEN

    def system_prefix(self, system_prompt: str) -> list[int]:
        """Return the ids of the prefix that all prompts of a system prompt share.

        ValueError if the system prompt is empty, or if the chat template does not put it first.
        """
        if not system_prompt:
            raise ValueError("the system prompt is empty")
        one, other = (
            self.build(LLMGenerationRequest(text, system_prompt=system_prompt), (), (), ()) for text in "a0"
        )
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
        ids = [token for token, _ in pairs]
        if not ids:
            raise ValueError(
                "no prompt begins with this system prompt: the chat template puts the text first"
            )
        return ids

    def build(
        self,
        request: LLMGenerationRequest,
        image_tokens: Sequence[int],
        audio_tokens: Sequence[int],
        history: Sequence[int],
    ) -> list[int]:
        """Return the ids of the prompt.

        The user's content has this order: image_tokens[i] placeholders for image i, the history's tokens,
        audio_tokens[i] placeholders for sound i, and the text. Special tokens in the user's text stay plain
        text. ValueError if the template leaves out an image, a sound or the history.
        """
        guard, (system, prompt) = self._tokenizer.protect(request.system_prompt, request.prompt)
        content: list[dict[str, Any]] = [{"type": "image"} for _ in image_tokens]
        if history:
            content.append({"type": "trajectory_history"})
        content += [{"type": "audio"} for _ in audio_tokens]
        content.append({"type": "text", "text": prompt})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        ids = self._tokenizer.encode_prompt(self._template.render(messages), guard)
        before, after = self._image_boundaries
        images = [[*before, *[self._image_token] * count, *after] for count in image_tokens]
        sounds = [[self._audio_token] * count for count in audio_tokens]
        ids = _fill(ids, self._image_token, images, "images")
        ids = _fill(ids, self._audio_token, sounds, "sounds")
        return _fill(ids, self._history_token, [history] if history else [], "trajectory histories")


def _or_no_token(token: int | None) -> int:
    return NO_TOKEN if token is None else token


def _fill(ids: Sequence[int], placeholder: int, contents: Sequence[Sequence[int]], what: str) -> list[int]:
    """Replace the i-th placeholder by contents[i]. ValueError for too few of them."""
    filled: list[int] = []
    waiting = list(contents)
    for token in ids:
        filled += waiting.pop(0) if token == placeholder and waiting else [token]
    if waiting:
        raise ValueError(
            f"the chat template has {len(contents) - len(waiting)} placeholders for {len(contents)} {what}"
        )
    return filled
