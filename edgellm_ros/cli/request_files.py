# SPDX-License-Identifier: Apache-2.0
"""Conversations and lists of requests in JSON files, as in OpenAI's chat API.

  conversation   [{"role": "user", "content": [{"type": "image", "image": "frame.png"},
                                               {"type": "text", "text": "go there"}]}]
                 {"messages": [...], "tools": [...], "enable_thinking": false}
                 {"messages": [..., {"role": "assistant", "content": "The box is"}],
                  "continue_final_message": true}
  requests       [{"prompt": "go there", "images": ["frame.png"], "max_tokens": 20}, {"messages": [...]}]
  videos         {"type": "video", "frames": ["0.png", "1.png"], "timestamps": [0.0, 0.5]}, in seconds
                 {"type": "video", "frames": ["0.png", "1.png"], "fps": 2}
                 {"type": "video", "video": "clip.mp4", "fps": 2}

Files are relative to the folder of the JSON file. Every error names the file, and the place in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.cli.inputs import read_bytes, read_image
from edgellm_ros.echo import quoted

if TYPE_CHECKING:
    import numpy as np

    from edgellm_ros.multimodal.sound import Sound
    from edgellm_ros.multimodal.video import Video
    from edgellm_ros.runtime.conversation import Message, Part, VideoPart

TEMPLATE_KEYS = ("tools", "enable_thinking", "chat_template_kwargs", "continue_final_message")
CONVERSATION_KEYS = ("messages", *TEMPLATE_KEYS)
# passed on to the template
MESSAGE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
SHORT_KEYS = {"prompt": "prompt", "system": "system_prompt"}  # key -> field of LLMGenerationRequest
SAMPLING_KEYS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "stop", "seed",
    "json_schema", "regex", "choices",
)  # fmt: skip
OTHER_KEYS = (
    "lora", "logprobs", "history", "speed", "action_samples", "noise_seed", "denoise_steps",
    "state", "cameras",
)  # fmt: skip
REQUEST_KEYS = (*CONVERSATION_KEYS, *SHORT_KEYS, "images", "audio", *SAMPLING_KEYS, *OTHER_KEYS)

ReadSound = Callable[[Path], "Sound"]


@dataclass(frozen=True)
class FileReaders:
    """Functions that read files for one engine."""

    sound: ReadSound
    video: Callable[[Path, float], Video]  # path, frames per second to sample


def read_conversation(path: str | Path, readers: FileReaders) -> dict[str, Any]:
    """Read a conversation; return its fields of LLMGenerationRequest.

    The file has a list of messages, or an object with messages, tools, enable_thinking, chat_template_kwargs
    and continue_final_message. ValueError or OSError.
    """
    data = _read_json(path)
    if isinstance(data, list):
        data = {"messages": data}
    _check_object(data, str(path), CONVERSATION_KEYS, required=("messages",), also="a list of messages or ")
    return _conversation(data, Path(path), str(path), readers)


def read_request_list(path: str | Path) -> list[Any]:
    """Read a list of requests as JSON values, for `request_fields`.

    ValueError or OSError.
    """
    data = _read_json(path)
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: expected a list with at least one request, got {_described(data)}")
    return data


def request_fields(data: Any, where: str, path: str | Path, readers: FileReaders) -> dict[str, Any]:
    """Return one request's fields of LLMGenerationRequest.

    Those of its sampling are under "sampling". where: its place in the file, for errors. ValueError or
    OSError.
    """
    if isinstance(data, list):
        data = {"messages": data}
    _check_object(data, where, REQUEST_KEYS, required=(), also="a list of messages or ")
    folder = Path(path).parent
    fields: dict[str, Any] = {key: data[key] for key in OTHER_KEYS if key in data}
    fields |= {name: data[key] for key, name in SHORT_KEYS.items() if key in data}
    for key, read in (("images", read_image), ("audio", readers.sound)):
        if key in data:
            if not isinstance(data[key], list):
                raise ValueError(f"{where}.{key}: expected a list of file names, got {_described(data[key])}")
            fields[key] = [
                _read_file(read, folder, name, f"{where}.{key}[{number}]")
                for number, name in enumerate(data[key])
            ]
    if "history" in data:
        fields["history"] = _poses(data["history"], f"{where}.history")
    fields["sampling"] = {key: data[key] for key in SAMPLING_KEYS if key in data}
    if not {"messages", "prompt", "audio"} & set(data):
        raise ValueError(f"{where}: nothing to answer: give messages, prompt or audio")
    return fields | _conversation(data, Path(path), where, readers)


def _conversation(data: dict[str, Any], path: Path, where: str, readers: FileReaders) -> dict[str, Any]:
    fields: dict[str, Any] = {key: data[key] for key in TEMPLATE_KEYS if data.get(key) is not None}
    if "messages" in data:
        messages = data["messages"]
        if not isinstance(messages, list):
            raise ValueError(f"{where}: messages: expected a list, got {_described(messages)}")
        place = f"{where}: messages"
        fields["messages"] = [
            _message(message, f"{place}[{index}]", path.parent, readers)
            for index, message in enumerate(messages)
        ]
    return fields


def _message(data: Any, where: str, folder: Path, readers: FileReaders) -> Message:
    from edgellm_ros.runtime.conversation import Message

    _check_object(data, where, ("role", "content", *MESSAGE_FIELDS), required=("role",))
    content = data.get("content")
    if content is None and "tool_calls" in data:
        content = ""
    if isinstance(content, list):
        content = [
            _part(part, f"{where}.content[{index}]", folder, readers) for index, part in enumerate(content)
        ]
    elif not isinstance(content, str):
        raise ValueError(f"{where}.content: expected a string or a list of parts, got {_described(content)}")
    fields = {key: data[key] for key in MESSAGE_FIELDS if data.get(key) is not None}
    if "tool_calls" in fields:
        fields["tool_calls"] = _with_argument_objects(fields["tool_calls"], f"{where}.tool_calls")
    return Message(data["role"], content, fields)


def _with_argument_objects(calls: Any, where: str) -> list[Any]:
    """Return calls of functions with arguments as objects, as chat templates expect.

    OpenAI's API writes the arguments as a string of JSON.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: expected a list of objects, got {_described(calls)}")
    return [_with_argument_object(call) for call in calls]


def _with_argument_object(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_argument_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _part(data: Any, where: str, folder: Path, readers: FileReaders) -> Part:
    from edgellm_ros.runtime.conversation import AudioPart, ImagePart, TextPart

    kinds = ("text", "image", "video", "audio")
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(data, dict) and kind not in kinds:
        raise ValueError(f"{where}.type: expected one of {', '.join(kinds)}, got {quoted(kind)}")
    if kind == "video":
        return _video(data, where, folder, readers)
    _check_object(data, where, ("type", str(kind)), required=(str(kind),))
    if kind == "text":
        if not isinstance(data["text"], str):
            raise ValueError(f"{where}.text: expected a string, got {_described(data['text'])}")
        return TextPart(data["text"])
    if kind == "image":
        return ImagePart(_read_file(read_image, folder, data["image"], f"{where}.image"))
    return AudioPart(_read_file(readers.sound, folder, data["audio"], f"{where}.audio"))


def _video(data: dict[str, Any], where: str, folder: Path, readers: FileReaders) -> VideoPart:
    from edgellm_ros.multimodal.video import Video
    from edgellm_ros.runtime.conversation import VideoPart

    if "video" in data:
        _check_object(data, where, ("type", "video", "fps"), required=("fps",))
        fps = data["fps"]
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
            raise ValueError(f"{where}.fps: expected a positive number, got {_described(fps)}")
        return VideoPart(
            _read_file(lambda path: readers.video(path, fps), folder, data["video"], f"{where}.video")
        )
    _check_object(data, where, ("type", "frames", "timestamps", "fps"), required=("frames",))
    names = data["frames"]
    if not isinstance(names, list):
        raise ValueError(f"{where}.frames: expected a list of file names, got {_described(names)}")
    frames = [
        _read_file(read_image, folder, name, f"{where}.frames[{index}]") for index, name in enumerate(names)
    ]
    try:
        return VideoPart(Video(frames, data.get("timestamps"), data.get("fps")))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_file(read: Callable[[Path], Any], folder: Path, name: Any, where: str) -> Any:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: expected a file name, got {quoted(name)}")
    try:
        return read(folder / name)
    except (ValueError, OSError) as error:
        raise ValueError(f"{where}: {error}") from None


def _poses(value: Any, where: str) -> np.ndarray:
    import numpy as np

    try:
        return np.asarray(value, np.float64)
    except (ValueError, TypeError):
        raise ValueError(f"{where}: expected poses [x, y(, heading)], got {_described(value)}") from None


def _read_json(path: str | Path) -> Any:
    try:
        return json.loads(read_bytes(path).decode())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None


def _check_object(
    data: Any, where: str, known: Collection[str], required: Collection[str], also: str = ""
) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected {also}an object, got {_described(data)}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: unknown key {quoted(key)}; known are {', '.join(known)}")
    for key in required:
        if key not in data:
            raise ValueError(f"{where}: missing key {key!r}")


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return quoted(value)
