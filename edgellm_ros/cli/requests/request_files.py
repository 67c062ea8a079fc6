# SPDX-License-Identifier: Apache-2.0
"""Conversations and lists of requests in JSON files, as in OpenAI's chat API.

  conversation   [{"role": "user", "content": [{"type": "image", "image": "frame.png"},
                                               {"type": "text", "text": "go there"}]}]
                 {"messages": [...], "tools": [...], "enable_thinking": false}
                 {"messages": [..., {"role": "assistant", "content": "The box is"}],
                  "continue_final_message": true}
  requests       [{"prompt": "go there", "images": ["frame.png"], "max_tokens": 20}, {"messages": [...]}]

docs/requests.md describes all keys, messages/content_parts.py the parts of messages. Files are relative to
the folder of the JSON file. Every error names the file, and the place in it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.io.contents import read_bytes
from edgellm_ros.messages.content_parts import FileReaders, read_media
from edgellm_ros.messages.json_checks import check_object, described
from edgellm_ros.runtime.sampling_params import SamplingParams
from edgellm_ros.strict_json import parse_json

if TYPE_CHECKING:
    import numpy as np

TEMPLATE_KEYS = ("tools", "enable_thinking", "chat_template_kwargs", "continue_final_message")
CONVERSATION_KEYS = ("messages", *TEMPLATE_KEYS)
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
    return _conversation(data, str(path), replace(readers, folder=Path(path).parent))


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
    readers = replace(readers, folder=Path(path).parent)
    fields: dict[str, Any] = {key: data[key] for key in OTHER_KEYS if key in data}
    fields |= {name: data[key] for key, name in SHORT_KEYS.items() if key in data}
    for key, kind, read in (("images", "image", readers.image), ("audio", "audio", readers.sound)):
        if key in data:
            if not isinstance(data[key], list):
                raise ValueError(f"{where}.{key}: expected a list of file names, got {described(data[key])}")
            fields[key] = [
                read_media(read, kind, readers.folder, name, f"{where}.{key}[{number}]")
                for number, name in enumerate(data[key])
            ]
    if "history" in data:
        fields["history"] = _poses(data["history"], f"{where}.history")
    fields["sampling"] = {key: data[key] for key in SAMPLING_KEYS if key in data}
    if not {"messages", "prompt", "audio", "state"} & set(data):
        raise ValueError(f"{where}: nothing to answer: give messages, prompt or audio")
    return fields | _conversation(data, where, readers)


def _conversation(data: dict[str, Any], where: str, readers: FileReaders) -> dict[str, Any]:
    fields: dict[str, Any] = {key: data[key] for key in TEMPLATE_KEYS if data.get(key) is not None}
    if "messages" in data:
        from edgellm_ros.messages.reading import read_messages

        fields["messages"] = read_messages(data["messages"], f"{where}: messages", readers)
    return fields


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
