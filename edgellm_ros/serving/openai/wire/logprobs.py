# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from edgellm_ros.runtime.request import LLMGenerationResponse

LEAST = -9999.0  # in place of smaller values, as in OpenAI's API


@dataclass(frozen=True)
class Vocabulary:
    """What log-probabilities are written with; `token_bytes`: the bytes of a token."""

    token_bytes: Callable[[int], bytes]
    stop_token_ids: Collection[int]


def chat_logprobs(response: LLMGenerationResponse, top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat."""
    content = []
    for token, chosen, likely in _tokens(response, vocabulary):
        entry = _entry(token, chosen, vocabulary)
        entry["top_logprobs"] = [_entry(other, value, vocabulary) for other, value in likely[:top]]
        content.append(entry)
    return {"content": content, "refusal": None}


def text_logprobs(response: LLMGenerationResponse, top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a completion."""
    tokens, values, tops, offsets, offset = [], [], [], [], 0
    for token, chosen, likely in _tokens(response, vocabulary):
        tokens.append(_name(vocabulary.token_bytes(token)))
        values.append(max(chosen, LEAST))
        shown = {_name(vocabulary.token_bytes(other)): max(value, LEAST) for other, value in likely[:top]}
        tops.append(shown if top else None)
        offsets.append(offset)
        offset += len(vocabulary.token_bytes(token).decode(errors="replace"))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _tokens(
    response: LLMGenerationResponse, vocabulary: Vocabulary
) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Yield tokens but the stop token, with log-probabilities and likeliest tokens."""
    for token, entries in zip(response.token_ids, response.logprobs or [], strict=True):
        if token not in vocabulary.stop_token_ids:
            yield token, dict(entries)[token], entries


def _entry(token: int, value: float, vocabulary: Vocabulary) -> dict[str, Any]:
    found = vocabulary.token_bytes(token)
    token_text = found.decode(errors="replace")
    return {"token": token_text, "logprob": max(float(value), LEAST), "bytes": list(found)}


def _name(found: bytes) -> str:
    r"""Return the text of a token; of a part of a character bytes:\xe2\x80.

    OpenAI's API writes it so.
    """
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
