# SPDX-License-Identifier: Apache-2.0
"""Reads the messages of a conversation from JSON values."""

from __future__ import annotations

from typing import Any

from edgellm_ros.messages.content_parts import FileReaders, read_part
from edgellm_ros.messages.json_checks import check_object, described
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.strict_json import parse_json

# passed on to the chat template
MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")


def read_messages(data: Any, where: str, readers: FileReaders) -> list[Message]:
    """Read the messages of a conversation, oldest first.

    ValueError names the place of what is wrong, `where` and below.
    """
    if not isinstance(data, list):
        raise ValueError(f"{where}: expected a list, got {described(data)}")
    return [_message(message, f"{where}[{index}]", readers) for index, message in enumerate(data)]


def _message(data: Any, where: str, readers: FileReaders) -> Message:
    check_object(data, where, ("role", "content", *MESSAGE_FIELDS), required=("role",))
    content = data.get("content")
    if content is None and "tool_calls" in data:
        content = ""
    if isinstance(content, list):
        content = [
            read_part(part, f"{where}.content[{index}]", readers) for index, part in enumerate(content)
        ]
    elif not isinstance(content, str):
        raise ValueError(f"{where}.content: expected a string or a list of parts, got {described(content)}")
    fields = {key: data[key] for key in MESSAGE_FIELDS if data.get(key) is not None}
    if "tool_calls" in fields:
        fields["tool_calls"] = _with_argument_objects(fields["tool_calls"], f"{where}.tool_calls")
    return Message(data["role"], content, fields)


def _with_argument_objects(calls: Any, where: str) -> list[Any]:
    """Return calls of functions with arguments as objects, as chat templates expect.

    OpenAI's API writes the arguments as a string of JSON.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: expected a list of objects, got {described(calls)}")
    return [_with_argument_object(call) for call in calls]


def _with_argument_object(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_argument_object(call["function"])}
    try:
        arguments = parse_json(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
