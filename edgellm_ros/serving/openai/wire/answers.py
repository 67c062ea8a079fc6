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
from edgellm_ros.serving.openai.wire.asked import Asked
from edgellm_ros.serving.openai.wire.call_marks import before_calls
from edgellm_ros.serving.openai.wire.logprobs import Vocabulary, chat_logprobs, text_logprobs
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
        self._head: Json = {"id": self.prefix + secrets.token_hex(12), "created": int(time.time())}

    def whole(self, responses: Sequence[LLMGenerationResponse]) -> Json:
        """Return the answer with all choices."""
        choices = [self._choice(index, response) for index, response in enumerate(responses)]
        return self._object(self.kind, choices, usage=usage(responses, self.asked.choices))

    def begin(self) -> list[Json]:
        """Return the first events of a stream."""
        return []

    @abstractmethod
    def piece(self, index: int, text: str) -> list[Json]:
        """Return the events of a piece of a choice's text."""

    @abstractmethod
    def end(self, index: int, response: LLMGenerationResponse) -> list[Json]:
        """Return the last events of a choice."""

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

    def piece(self, index: int, text: str) -> list[Json]:
        self._texts[index] += text
        return self._send_up_to(index, self._settled(self._texts[index]))

    def end(self, index: int, response: LLMGenerationResponse) -> list[Json]:
        tools = self.asked.tools
        calls, content = tools.calls(response), tools.content(response)
        if calls:  # the content is without white space around it
            self._sent[index] = self._sent[index].strip()
        events = self._send_up_to(index, content)
        if calls:
            listed = [{"index": place, **_call(call)} for place, call in enumerate(calls)]
            events.append(self._delta(index, {"tool_calls": listed}))
        return [*events, self._delta(index, {}, _reason(response, calls), self._logprobs(response))]

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
            "logprobs": self._logprobs(response),
            "finish_reason": _reason(response, calls),
        }

    def _delta(
        self, index: int, delta: Json, reason: str | None = None, logprobs: Json | None = None
    ) -> Json:
        return self._event({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _logprobs(self, response: LLMGenerationResponse) -> Json | None:
        top = self.asked.logprobs
        return None if top is None else chat_logprobs(response, top, self._vocabulary)


class TextAnswers(Answers):
    """Answers of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, asked: Asked, vocabulary: Vocabulary) -> None:
        super().__init__(asked, vocabulary)
        self._sent = [0] * len(asked.requests)  # characters

    def piece(self, index: int, text: str) -> list[Json]:
        self._sent[index] += len(text)
        return [self._event(self._part(index, text))]

    def end(self, index: int, response: LLMGenerationResponse) -> list[Json]:
        part = self._part(index, response.text[self._sent[index] :], response.finish_reason)
        return [self._event({**part, "logprobs": self._logprobs(response)})]

    def _choice(self, index: int, response: LLMGenerationResponse) -> Json:
        part = self._part(index, response.text, response.finish_reason)
        return {**part, "logprobs": self._logprobs(response)}

    def _part(self, index: int, text: str, reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, response: LLMGenerationResponse) -> Json | None:
        top = self.asked.logprobs
        return None if top is None else text_logprobs(response, top, self._vocabulary)


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
