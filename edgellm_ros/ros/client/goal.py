# SPDX-License-Identifier: Apache-2.0
"""Makes a goal of ~/plan from Python values: arrays, files and messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from edgellm_ros.action import Plan
from edgellm_ros.echo import printable, quoted
from edgellm_ros.msg import AudioChunk, ChatMessage, PreviousChunk, SamplingParams
from edgellm_ros.multimodal.image_pixels import check_image
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.ros.client.plan_call import PlanResult
from edgellm_ros.ros.node.sensors.images import decode_image, encode_image
from edgellm_ros.runtime.grammar.json_schemas import schema_text

MAX_SOUND_S = 600.0  # of a sound file; the node says how much the engine takes


def make_goal(prompt: str = "", **fields: Any) -> Plan.Goal:
    """Make a goal of fields of Plan.Goal and, by their own names, of SamplingParams.

    None for any of them means the field's default. TypeError names a field that does not exist or has another
    type; ValueError and OSError describe an image or a sound that cannot be used.
    """
    # Without the checks of the setters, a value of another type ends the process when it is sent.
    goal = Plan.Goal(sampling=SamplingParams(check_fields=True), check_fields=True)
    for name, value in {"prompt": prompt, **fields}.items():
        if name in Plan.Goal.get_fields_and_field_types():
            owner = goal
        elif name in SamplingParams.get_fields_and_field_types():
            owner = goal.sampling
        else:
            raise TypeError(f"a plan has no argument {quoted(name)}; {_known(name)}")
        if value is None:
            continue
        convert = CONVERTERS.get(name, _plain)
        try:
            setattr(owner, name, convert(value))
        except (AssertionError, OverflowError) as error:  # from the message's setter
            raise TypeError(f"{name}: {printable(str(error))}, got {quoted(value)}") from None
    return goal


def to_images(images: Any) -> list[Image]:
    """Convert one image or several: RGB uint8 arrays [H, W, 3], files, messages."""
    return [_to_image(image) for image in _listed(images)]


def to_audio(audio: Any) -> list[AudioChunk]:
    """Convert one sound to messages.

    The sound is (samples [N], Hz), a Sound, a file, a message, or messages in their order. Samples are float
    with full scale -1..1.
    """
    if isinstance(audio, list) and all(isinstance(chunk, AudioChunk) for chunk in audio):
        return audio
    if isinstance(audio, AudioChunk):
        return [audio]
    if isinstance(audio, (str, Path)):
        from edgellm_ros.io.sound_file import read_sound

        sound = read_sound(audio, MAX_SOUND_S)
    elif isinstance(audio, Sound):
        sound = audio
    elif isinstance(audio, tuple) and len(audio) == 2:
        samples = np.asarray(audio[0])
        sound = Sound(samples.astype(np.float32) if samples.dtype.kind == "f" else samples, audio[1])
    else:
        raise TypeError(
            "audio must be (samples, sample_rate), a Sound, a file, an AudioChunk or a list of them, got "
            f"{type(audio).__name__}"
        )
    data = sound.samples.astype("<f4").tobytes()
    return [AudioChunk(encoding=AudioChunk.F32LE, sample_rate=int(sound.sample_rate), channels=1, data=data)]


def to_messages(messages: Iterable[Any]) -> list[ChatMessage]:
    """Convert what was said before to messages.

    An item is (role, text), (role, text, images), a ChatMessage, or the reply to a plan. The reply becomes
    the assistant's message, with its tool calls.
    """
    converted = []
    for index, message in enumerate(messages):
        if isinstance(message, ChatMessage):
            converted.append(message)
        elif isinstance(message, Plan.Result):
            said = message.generation
            converted.append(
                ChatMessage(role=ChatMessage.ASSISTANT, text=said.content, tool_calls=said.tool_calls)
            )
        elif isinstance(message, (tuple, list)) and len(message) in (2, 3):
            role, text, images = (*message, None)[:3]
            images = [] if images is None else to_images(images)
            converted.append(ChatMessage(role=role, text=text, images=images, check_fields=True))
        else:
            raise TypeError(
                f"earlier_messages[{index}] must be (role, text), (role, text, images), a ChatMessage or a "
                f"Plan.Result, got {quoted(message)}"
            )
    return converted


def to_previous_chunk(previous: Any) -> list[PreviousChunk]:
    """Convert the chunk that a plan continues.

    The chunk is a message, "off", or the message's fields by name. Without a form the fields are guided;
    `chunk` may be the result of a plan, whose first chunk it is then.
    """
    if previous == PreviousChunk.OFF:
        previous = {"form": PreviousChunk.OFF}
    if isinstance(previous, Mapping):
        given = {name: value for name, value in previous.items() if value is not None}
        fields = {"form": PreviousChunk.GUIDED, **given}
        if isinstance(fields.get("chunk"), PlanResult):
            chunks = fields["chunk"].reply.action_chunks
            if not chunks:
                raise ValueError("previous_chunk: chunk is the result of a plan without actions")
            fields["chunk"] = chunks[0]
        previous = PreviousChunk(**fields, check_fields=True)
    if not isinstance(previous, PreviousChunk):
        raise TypeError(
            'previous_chunk must be "off", a PreviousChunk or its fields by name, got '
            f"{type(previous).__name__}"
        )
    return [previous]


def _to_image(image: Any) -> Image:
    if isinstance(image, Image):
        return image
    if isinstance(image, CompressedImage):
        return encode_image(decode_image(image), image.header)
    if isinstance(image, (str, Path)):
        from edgellm_ros.io.image_file import read_image

        image = read_image(image)
    check_image(image)
    return encode_image(image, Header())


def _listed(values: Any) -> list[Any]:
    """Return a list of one value or of several."""
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _tool_text(tool: Any, index: int) -> str:
    """Return the JSON schema of a function as text."""
    if isinstance(tool, str):
        return tool
    try:
        return json.dumps(tool)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"tools[{index}] is not JSON: {printable(str(error))}") from None


def _plain(value: Any) -> Any:
    """Return a number of NumPy as Python's, which messages take."""
    return value.item() if isinstance(value, np.generic) else value


def _known(name: str) -> str:
    """Return the name that was probably meant, or all names."""
    names = [*Plan.Goal.get_fields_and_field_types(), *SamplingParams.get_fields_and_field_types()]
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else f"its arguments are {', '.join(names)}"


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "images": to_images,
    "audio": to_audio,
    "earlier_messages": to_messages,
    "previous_chunk": to_previous_chunk,
    "state": lambda state: np.asarray(state, np.float64).tolist(),
    "tools": lambda tools: [_tool_text(tool, index) for index, tool in enumerate(_listed(tools))],
    "stop": lambda stop: [stop] if isinstance(stop, str) else list(stop),
    "json_schema": lambda schema: "" if schema == "" else schema_text(schema),
    "choices": lambda choices: [choices] if isinstance(choices, str) else list(choices),
    **{name: float for name, kind in SamplingParams.get_fields_and_field_types().items() if kind == "double"},
}
