# SPDX-License-Identifier: Apache-2.0
"""Texts that are too long, refused before others wait for the work on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgellm_ros.runtime.conversation import Message, TextPart
from edgellm_ros.serving.openai.errors import TOO_LONG, ApiError

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig

MOST_CHARACTERS = 32  # per token of the KV cache; of English about 4 are a token
MOST_OF_GRAMMAR = 1 << 16  # characters, which take half a second to compile


def check_prompt(characters: int, config: EngineConfig, place: str) -> None:
    """Refuse a text that is much longer than the KV cache. ApiError 400."""
    capacity = config.builder.max_kv_cache_capacity
    if characters > MOST_CHARACTERS * capacity:
        message = f"{place}: {characters} characters are too many for the {capacity} tokens of this engine"
        raise ApiError(400, message, place, TOO_LONG)


def check_grammar(grammar: Any, place: str) -> None:
    """Refuse a grammar whose compilation takes long. ApiError 400."""
    characters = characters_of(grammar)
    if characters > MOST_OF_GRAMMAR:
        message = f"{place}: a grammar has at most {MOST_OF_GRAMMAR} characters, this one has {characters}"
        raise ApiError(400, message, place)


def text_of_messages(messages: Sequence[Message]) -> int:
    """Count the characters of messages, without images and sounds."""
    parts = (part for message in messages for part in message.parts if isinstance(part, TextPart))
    return sum(len(part.text) for part in parts) + sum(characters_of(each.fields) for each in messages)


def characters_of(value: Any) -> int:
    """Count the characters of all texts of a JSON value, and one for each other item."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + characters_of(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(characters_of, value))
    return 1
