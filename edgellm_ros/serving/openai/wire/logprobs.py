# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_ros.runtime.request import LLMGenerationResponse

Entries = list[tuple[int, float]]  # token ids with their log-probabilities
Token = tuple[int, Entries]  # a token of an answer, with its own entry and those of likely ones

LEAST = -9999.0  # in place of smaller values, as in OpenAI's API


@dataclass(frozen=True)
class Vocabulary:
    """What log-probabilities are written with; `token_bytes`: the bytes of a token."""

    token_bytes: Callable[[int], bytes]
    stop_token_ids: Collection[int]


class PendingTokens:
    """Tokens of a streamed answer that are in no event yet."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._count = 0  # of tokens that were added

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Entries]) -> None:
        """Add the next tokens."""
        added = list(zip(token_ids, logprobs, strict=False))
        self._tokens += added
        self._count += len(added)

    def add_rest(self, response: LLMGenerationResponse) -> None:
        """Add the tokens of the whole answer that were not added yet."""
        self.add(response.token_ids[self._count :], (response.logprobs or [])[self._count :])

    def take(self) -> list[Token]:
        """Return the tokens, which are in an event then."""
        tokens, self._tokens = self._tokens, []
        return tokens


def tokens_of(response: LLMGenerationResponse) -> list[Token]:
    """Return all tokens of an answer."""
    return list(zip(response.token_ids, response.logprobs or [], strict=True))


def chat_logprobs(tokens: Sequence[Token], top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat."""
    content = []
    for token, chosen, likely in _shown(tokens, vocabulary):
        entry = _entry(token, chosen, vocabulary)
        entry["top_logprobs"] = [_entry(other, value, vocabulary) for other, value in likely[:top]]
        content.append(entry)
    return {"content": content, "refusal": None}


def text_logprobs(
    tokens: Sequence[Token], top: int, vocabulary: Vocabulary, offset: int = 0
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a completion.

    offset: of the first token in the answer, in characters.
    """
    names, values, tops, offsets = [], [], [], []
    for token, chosen, likely in _shown(tokens, vocabulary):
        names.append(_name(vocabulary.token_bytes(token)))
        values.append(max(chosen, LEAST))
        shown = {_name(vocabulary.token_bytes(other)): max(value, LEAST) for other, value in likely[:top]}
        tops.append(shown if top else None)
        offsets.append(offset)
        offset += length_of(token, vocabulary)
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def length_of(token: int, vocabulary: Vocabulary) -> int:
    """Return the characters of a token, as `text_offset` counts them."""
    return len(vocabulary.token_bytes(token).decode(errors="replace"))


def _shown(tokens: Sequence[Token], vocabulary: Vocabulary) -> Iterator[tuple[int, float, Entries]]:
    """Yield tokens but the stop token, with log-probabilities and likeliest tokens."""
    for token, entries in tokens:
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
