# SPDX-License-Identifier: Apache-2.0
"""Requests to /v1/chat/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgellm_ros.messages.reading import read_messages
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.serving.openai.errors import bad_request
from edgellm_ros.serving.openai.limits import MAX_CHOICES, Limits
from edgellm_ros.serving.openai.models import Models
from edgellm_ros.serving.openai.wire.asked import Asked, repeated
from edgellm_ros.serving.openai.wire.fields import Fields
from edgellm_ros.serving.openai.wire.lengths import characters_of, check_prompt, text_of_messages
from edgellm_ros.serving.openai.wire.media import limited_readers
from edgellm_ros.serving.openai.wire.sampling import IGNORED, read_sampling, read_streaming
from edgellm_ros.serving.openai.wire.tools import ToolUse, read_tools

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig

MAX_TOP_LOGPROBS = 20
MAX_TOKENS = ("max_completion_tokens", "max_tokens")  # the new and the old name
ANSWER_FIELDS = ("refusal", "annotations", "audio", "function_call")  # of answers, empty if not used
REQUEST_FIELDS = {name: name for name in ("messages", "tools", "chat_template_kwargs")}
DEVELOPER = "developer"  # OpenAI's newer name of the role system


def read_chat(data: Any, config: EngineConfig, models: Models, limits: Limits) -> Asked:
    """Read a request.

    ApiError 400 for a field that is wrong, 404 for an unknown model.
    """
    fields = Fields(data)
    model = fields.text("model", models.base)
    adapter = models.adapter(model)
    messages = _messages(fields, config, limits)
    tools = read_tools(fields)
    check_prompt(text_of_messages(messages) + characters_of(tools.tools), config, "messages")
    grammar = _grammar(fields, tools)
    sampling = read_sampling(fields, limits, MAX_TOKENS, limits.max_tokens, grammar)
    choices = fields.integer("n", 1, MAX_CHOICES, 1)
    stream, include_usage = read_streaming(fields)
    logprobs = _logprobs(fields)
    template = _template_variables(fields)
    fields.neutral("modalities", ["text"])
    fields.done(IGNORED)
    try:
        request = LLMGenerationRequest(
            messages=tuple(messages),
            tools=tools.tools or None,
            lora=adapter,
            sampling=sampling,
            logprobs=0 if logprobs is None else max(logprobs, 1),
            **template,
        )
    except ValueError as error:
        raise bad_request(error, REQUEST_FIELDS, "messages") from None
    requests = repeated(request, choices)
    return Asked(model, requests, choices, stream, include_usage, logprobs=logprobs, tools=tools)


def _messages(fields: Fields, config: EngineConfig, limits: Limits) -> list[Message]:
    data = fields.need("messages")
    if isinstance(data, list):
        data = [_known_role(message) for message in data]
    try:
        return read_messages(data, "messages", limited_readers(config, limits))
    except ValueError as error:
        raise bad_request(error, REQUEST_FIELDS, "messages") from None


def _known_role(message: Any) -> Any:
    """Return a message whose role the runtime knows, without OpenAI's empty fields."""
    if not isinstance(message, dict):
        return message
    message = {key: value for key, value in message.items() if value or key not in ANSWER_FIELDS}
    return {**message, "role": "system"} if message.get("role") == DEVELOPER else message


def _grammar(fields: Fields, tools: ToolUse) -> dict[str, Any]:
    """Return the answer's JSON schema and the field that it comes from; {} = none."""
    given = fields.take("response_format")
    found: dict[str, Any] = {}
    if given is not None:
        outside = Fields(given, "response_format")
        kind = outside.choice("type", ("text", "json_object", "json_schema"))
        if kind is None:
            raise outside.refuse("type", "is missing")
        if kind == "json_object":
            found = {"json_schema": {"type": "object"}, "field": "response_format"}
        if kind == "json_schema":
            inside = Fields(outside.need("json_schema"), "response_format.json_schema")
            for name in ("name", "description"):
                inside.text(name)
            inside.flag("strict")
            schema = inside.need("schema")
            if not isinstance(schema, (dict, bool)):
                raise inside.refuse("schema", "expected a JSON schema: an object")
            inside.done()
            found = {"json_schema": schema, "field": "response_format"}
        outside.done()
    if found and tools.tools:
        raise fields.refuse(
            "response_format", "excludes tools: such an answer has no calls (tool_choice none)"
        )
    if tools.forced is not None:
        return {"json_schema": tools.forced, "field": "tools"}
    return found


def _logprobs(fields: Fields) -> int | None:
    """Return how many likely tokens to report; None = no log-probabilities."""
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise fields.refuse("top_logprobs", "needs logprobs: set it to true")
    return (top or 0) if wanted else None


def _template_variables(fields: Fields) -> dict[str, Any]:
    """Return the request's fields about the chat template."""
    given = fields.take("chat_template_kwargs")
    if given is None:
        return {}
    inside = Fields(given, "chat_template_kwargs")
    thinking = inside.take("enable_thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise inside.refuse("enable_thinking", "expected true or false")
    rest = {key: value for key, value in given.items() if key != "enable_thinking"}
    return {"enable_thinking": thinking, "chat_template_kwargs": rest}
