# SPDX-License-Identifier: Apache-2.0
"""PromptBuilder: a request to the token ids that the language model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm_ros.runtime.chat_template import ChatTemplate
from edgellm_ros.runtime.config import EngineConfig
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.tokenizer import Tokenizer


class PromptBuilder:
    """Renders the chat template, tokenises it, and expands its placeholders."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, config: EngineConfig) -> None:
        if tokenizer.size > config.llm.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.size} tokens, the language model {config.llm.vocab_size}"
            )
        self._tokenizer = tokenizer
        self._template = template
        self._image_token = config.special_tokens.image_token_id
        self._history_token = config.action.history_token_id if config.action else None

    def build(
        self, request: LLMGenerationRequest, image_tokens: Sequence[int], history: Sequence[int]
    ) -> list[int]:
        """Ids of the prompt, with image_tokens[i] placeholders for image i and the history's tokens.

        What the user wrote stays text, whatever special tokens it spells. ValueError if the template did not
        take an image in.
        """
        guard, (system, prompt) = self._tokenizer.protect(request.system_prompt, request.prompt)
        content: list[dict[str, Any]] = [{"type": "image"} for _ in image_tokens]
        if history:
            content.append({"type": "trajectory_history"})
        content.append({"type": "text", "text": prompt})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        ids = self._tokenizer.encode_prompt(self._template.render(messages), guard)
        return self._expand(ids, image_tokens, history)

    def _expand(self, ids: Sequence[int], image_tokens: Sequence[int], history: Sequence[int]) -> list[int]:
        expanded: list[int] = []
        images = 0
        for token in ids:
            if token == self._image_token and images < len(image_tokens):
                expanded += [token] * image_tokens[images]
                images += 1
            elif token == self._history_token and history:
                expanded += history
            else:
                expanded.append(token)
        if images < len(image_tokens):
            raise ValueError(f"the chat template took in {images} of {len(image_tokens)} images")
        return expanded
