# SPDX-License-Identifier: Apache-2.0
"""Conversations and lists of requests in JSON files, as in OpenAI's chat API.

  conversation   [{"role": "user", "content": [{"type": "image", "image": "frame.png"},
                                               {"type": "text", "text": "go there"}]}]
                 {"messages": [...], "tools": [...], "enable_thinking": false}
                 {"messages": [..., {"role": "assistant", "content": "The box is"}],
                  "continue_final_message": true}
  requests       [{"prompt": "go there", "images": ["frame.png"], "max_tokens": 20}, {"messages": [...]}]

docs/requests.md describes all keys, content_parts.py the parts of messages. Files are relative to the folder
of the JSON file. Every error names the file, and the place in it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.cli.requests.content_parts import FileReaders, read_media, read_part
from edgellm_ros.cli.requests.json_checks import check_object, described
from edgellm_ros.io.contents import read_bytes
from edgellm_ros.io.image_file import read_image
from edgellm_ros.runtime.sampling_params import SamplingParams
from edgellm_ros.strict_json import parse_json

if TYPE_CHECKING:
    import numpy as np

    from edgellm_ros.runtime.conversation import Message

TEMPLATE_KEYS = ("tools", "enable_thinking", "chat_template_kwargs", "continue_final_message")
CONVERSATION_KEYS = ("messages", *TEMPLATE_KEYS)
# passed on to the template
MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
SHORT_KEYS = {"prompt": "prompt", "system": "system_prompt"}  # key -> field of LLMGenerationRequest
SAMPLING_KEYS = [field.name for field in fields(SamplingParams)]
OTHER_KEYS = (
    "lora", "logprobs", "history", "speed", "action_samples", "noise_seed", "denoise_steps",
    "state", "cameras", "navigation", "guidance",
)  # fmt: skip
REQUEST_KEYS = (*CONVERSATION_KEYS, *SHORT_KEYS, "images", "audio", *SAMPLING_KEYS, *OTHER_KEYS)


def read_conversation(path: str | Path, readers: FileReaders) -> dict[str, Any]:
    """Read a conversation; return its fields of LLMGenerationRequest.

    The file has a list of messages, or an object with messages, tools, enable_thinking, chat_template_kwargs
    and continue_final_message. ValueError or OSError.
    """
    data = _read_json(path)
    if isinstance(data, list):
        data = {"messages": data}
    check_object(data, str(path), CONVERSATION_KEYS, required=("messages",), also="a list of messages or ")
    return _conversation(data, Path(path), str(path), readers)


def read_request_list(path: str | Path) -> list[Any]:
    """Read a list of requests as JSON values, for `request_fields`.

    ValueError or OSError.
    """
    data = _read_json(path)
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: expected a list with at least one request, got {described(data)}")
    return data


def request_fields(data: Any, where: str, path: str | Path, readers: FileReaders) -> dict[str, Any]:
    """Return one request's fields of LLMGenerationRequest.

    Fields of sampling are under "sampling". A key with null is absent. where: its place in the file, for
    errors. ValueError or OSError.
    """
    if isinstance(data, list):
        data = {"messages": data}
    check_object(data, where, REQUEST_KEYS, required=(), also="a list of messages or ")
    data = {key: value for key, value in data.items() if value is not None}
    folder = Path(path).parent
    fields: dict[str, Any] = {key: data[key] for key in OTHER_KEYS if key in data}
    fields |= {name: data[key] for key, name in SHORT_KEYS.items() if key in data}
    for key, kind, read in (("images", "image", read_image), ("audio", "audio", readers.sound)):
        if key in data:
            if not isinstance(data[key], list):
                raise ValueError(f"{where}.{key}: expected a list of file names, got {described(data[key])}")
            fields[key] = [
                read_media(read, kind, folder, name, f"{where}.{key}[{number}]")
                for number, name in enumerate(data[key])
            ]
    if "history" in data:
        fields["history"] = _poses(data["history"], f"{where}.history")
    fields["sampling"] = {key: data[key] for key in SAMPLING_KEYS if key in data}
    if not {"messages", "prompt", "audio", "state"} & set(data):
        raise ValueError(f"{where}: nothing to answer: give messages, prompt or audio")
    return fields | _conversation(data, Path(path), where, readers)


def _conversation(data: dict[str, Any], path: Path, where: str, readers: FileReaders) -> dict[str, Any]:
    fields: dict[str, Any] = {key: data[key] for key in TEMPLATE_KEYS if data.get(key) is not None}
    if "messages" in data:
        messages = data["messages"]
        if not isinstance(messages, list):
            raise ValueError(f"{where}: messages: expected a list, got {described(messages)}")
        place = f"{where}: messages"
        fields["messages"] = [
            _message(message, f"{place}[{index}]", path.parent, readers)
            for index, message in enumerate(messages)
        ]
    return fields


def _message(data: Any, where: str, folder: Path, readers: FileReaders) -> Message:
    from edgellm_ros.runtime.conversation import Message

    check_object(data, where, ("role", "content", *MESSAGE_FIELDS), required=("role",))
    content = data.get("content")
    if content is None and "tool_calls" in data:
        content = ""
    if isinstance(content, list):
        content = [
            read_part(part, f"{where}.content[{index}]", folder, readers)
            for index, part in enumerate(content)
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


def _poses(value: Any, where: str) -> np.ndarray:
    import numpy as np

    try:
        return np.asarray(value, np.float64)
    except (ValueError, TypeError):
        raise ValueError(f"{where}: expected poses [x, y(, heading(, z))], got {described(value)}") from None


def _read_json(path: str | Path) -> Any:
    try:
        return parse_json(read_bytes(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
