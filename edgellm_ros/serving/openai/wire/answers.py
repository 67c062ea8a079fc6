# SPDX-License-Identifier: Apache-2.0
"""Answers in OpenAI's JSON: whole, and as the events of a stream.

chat         chunks of a delta: the role, pieces of the text, tool calls, and the reason of the end
completion   chunks of text, and the reason of the end
"""

from __future__ import annotations

import base64
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm_ros.runtime.request import LLMGenerationResponse, ToolCall
from edgellm_ros.runtime.scheduling.handle import TextPiece
from edgellm_ros.serving.openai.wire.asked import Asked
from edgellm_ros.serving.openai.wire.call_marks import before_calls
from edgellm_ros.serving.openai.wire.logprobs import (
    PendingTokens,
    Token,
    Vocabulary,
    chat_logprobs,
    length_of,
    text_logprobs,
    tokens_of,
)
from edgellm_ros.strict_json import strict_json

Json = dict[str, Any]


class Answers(ABC):
    """Writes the answers to one request of a client."""

    prefix = ""  # of ids
    kind = ""  # `object` of a whole answer
    chunk_kind = ""  # `object` of an event

    def __init__(self, asked: Asked, vocabulary: Vocabulary) -> None:
        self.asked = asked
        self._vocabulary = vocabulary
        self._pending = [PendingTokens() for _ in asked.requests]
        self._head: Json = {"id": self.prefix + secrets.token_hex(12), "created": int(time.time())}

    def whole(self, responses: Sequence[LLMGenerationResponse]) -> Json:
        """Return the answer with all choices."""
        choices = [self._choice(index, response) for index, response in enumerate(responses)]
        return self._object(self.kind, choices, usage=usage(responses, self.asked.choices))

    def begin(self) -> list[Json]:
        """Return the first events of a stream."""
        return []

    def piece(self, index: int, piece: TextPiece) -> list[Json]:
        """Return the events of a piece of a choice."""
        self._pending[index].add(piece.token_ids, piece.logprobs)
        return self._text(index, piece.text) if piece.text else []

    @abstractmethod
    def _text(self, index: int, text: str) -> list[Json]:
        """Return the events of a piece of a choice's text."""

    def end(self, index: int, response: LLMGenerationResponse) -> list[Json]:
        """Return the last events of a choice."""
        self._pending[index].add_rest(response)
        return self._end(index, response)

    @abstractmethod
    def _end(self, index: int, response: LLMGenerationResponse) -> list[Json]:
        """Return the last events of a choice."""

    def _next_logprobs(self, index: int) -> Json | None:
        """Return the `logprobs` of the tokens since the last event; None = no tokens."""
        stops = self._vocabulary.stop_token_ids
        tokens = [token for token in self._pending[index].take() if token[0] not in stops]
        return self._logprobs(index, tokens) if tokens and self.asked.logprobs is not None else None

    def _whole_logprobs(self, index: int, response: LLMGenerationResponse) -> Json | None:
        return None if self.asked.logprobs is None else self._logprobs(index, tokens_of(response))

    @abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Json:
        """Return the log-probabilities of some tokens in a choice's order."""

    def usage_event(self, responses: Sequence[LLMGenerationResponse]) -> Json:
        """Return the event after all others, if it is wanted."""
        return self._object(self.chunk_kind, [], usage=usage(responses, self.asked.choices))

    @abstractmethod
    def _choice(self, index: int, response: LLMGenerationResponse) -> Json:
        """Return a whole choice."""

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "model": self.asked.model, "choices": choices, **more}

    def _event(self, choice: Json) -> Json:
        more = {"usage": None} if self.asked.include_usage else {}
        return self._object(self.chunk_kind, [choice], **more)


class ChatAnswers(Answers):
    """Answers of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Asked, vocabulary: Vocabulary) -> None:
        super().__init__(asked, vocabulary)
        self._texts = [""] * len(asked.requests)  # that have arrived
        self._sent = [""] * len(asked.requests)

    def begin(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._delta(index, delta) for index in range(len(self.asked.requests))]

    def _text(self, index: int, text: str) -> list[Json]:
        self._texts[index] += text
        return self._send_up_to(index, self._settled(self._texts[index]))

    def _end(self, index: int, response: LLMGenerationResponse) -> list[Json]:
        tools = self.asked.tools
        calls, content = tools.calls(response), tools.content(response)
        if calls:  # the content is without white space around it
            self._sent[index] = self._sent[index].strip()
        events = self._send_up_to(index, content)
        if calls:
            listed = [{"index": place, **_call(call)} for place, call in enumerate(calls)]
            events.append(self._delta(index, {"tool_calls": listed}))
        return [*events, self._delta(index, {}, _reason(response, calls))]

    def _settled(self, text: str) -> str:
        """Return the part of an unfinished text that is surely no call."""
        if self.asked.tools.forced is not None:
            return ""
        return before_calls(text) if self.asked.tools.tools else text

    def _send_up_to(self, index: int, content: str) -> list[Json]:
        sent = self._sent[index]
        if len(content) <= len(sent) or not content.startswith(sent):
            return []
        self._sent[index] = content
        return [self._delta(index, {"content": content[len(sent) :]})]

    def _choice(self, index: int, response: LLMGenerationResponse) -> Json:
        tools = self.asked.tools
        calls, content = tools.calls(response), tools.content(response)
        message: Json = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._whole_logprobs(index, response),
            "finish_reason": _reason(response, calls),
        }

    def _delta(self, index: int, delta: Json, reason: str | None = None) -> Json:
        logprobs = self._next_logprobs(index)
        return self._event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Json:
        return chat_logprobs(tokens, self.asked.logprobs or 0, self._vocabulary)


class TextAnswers(Answers):
    """Answers of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, asked: Asked, vocabulary: Vocabulary) -> None:
        super().__init__(asked, vocabulary)
        self._sent = [0] * len(asked.requests)  # characters
        self._offsets = [0] * len(asked.requests)  # characters of the tokens in the events

    def _text(self, index: int, text: str) -> list[Json]:
        self._sent[index] += len(text)
        return [self._event(self._part(index, text, self._next_logprobs(index)))]

    def _end(self, index: int, response: LLMGenerationResponse) -> list[Json]:
        rest = response.text[self._sent[index] :]
        return [self._event(self._part(index, rest, self._next_logprobs(index), response.finish_reason))]

    def _choice(self, index: int, response: LLMGenerationResponse) -> Json:
        logprobs = self._whole_logprobs(index, response)
        return self._part(index, response.text, logprobs, response.finish_reason)

    def _part(self, index: int, text: str, logprobs: Json | None, reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> Json:
        offset = self._offsets[index]
        self._offsets[index] += sum(length_of(token, self._vocabulary) for token, _ in tokens)
        return text_logprobs(tokens, self.asked.logprobs or 0, self._vocabulary, offset)


def embeddings(asked: Asked, as_base64: bool, responses: Sequence[LLMGenerationResponse]) -> Json:
    """Return the answer of /v1/embeddings.

    A vector is the state of the text's last token after the deepest layer that the engine has as an output,
    with length 1.
    """
    data: list[Json] = []
    for index, response in enumerate(responses):
        states = response.hidden_states or {}
        vector = states[max(states)][0].astype(np.float32)
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
        values = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": values})
    tokens = sum(response.prompt_tokens for response in responses)
    return {
        "object": "list",
        "data": data,
        "model": asked.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def usage(responses: Sequence[LLMGenerationResponse], choices: int) -> Json:
    """Return the numbers of tokens; a prompt with several choices counts once."""
    firsts = responses[::choices]
    prompt = sum(response.prompt_tokens for response in firsts)
    answer = sum(len(response.token_ids) for response in responses)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(response.reused_tokens for response in firsts)},
    }


def _reason(response: LLMGenerationResponse, calls: Sequence[ToolCall]) -> str:
    return "tool_calls" if calls else response.finish_reason


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": strict_json(call.arguments)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
