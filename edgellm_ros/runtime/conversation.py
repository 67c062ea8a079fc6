# SPDX-License-Identifier: Apache-2.0
"""Messages of a conversation, with images, videos and sounds between the words.

A conversation is a sequence of messages, which say who said what. The content of a message is text, or parts
in the order in which the chat template writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgellm_ros.echo import quoted
from edgellm_ros.multimodal.device_image import Image, as_image
from edgellm_ros.multimodal.image_pixels import check_image
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.multimodal.video import Video

USER, ASSISTANT = "user", "assistant"
ROLES = ("system", USER, ASSISTANT, "tool")
LAST_ROLES = (USER, "tool")  # the roles that the model answers


@dataclass(frozen=True)
class TextPart:
    """Words; special tokens in them are plain text."""

    text: str


@dataclass(frozen=True, eq=False)
class ImagePart:
    """One image."""

    image: Image  # uint8 [H, W, 3], RGB; an array of any library, on the host or on the runtime's GPU

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", as_image(self.image))


@dataclass(frozen=True, eq=False)
class VideoPart:
    """One video: frames with timestamps."""

    video: Video


@dataclass(frozen=True, eq=False)
class AudioPart:
    """One sound."""

    sound: Sound


Part = TextPart | ImagePart | VideoPart | AudioPart


@dataclass(frozen=True, eq=False)
class Message:
    """One message of a conversation; `LLMGenerationRequest` checks it."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str | Sequence[Part]
    # further keys that the chat template may read, such as tool_calls and reasoning_content
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (TextPart(self.content),) if isinstance(self.content, str) else tuple(self.content)


def check_messages(messages: Sequence[Message], continue_final_message: bool = False) -> None:
    """Check a conversation; ValueError names index, role and what was expected.

    With `continue_final_message` the last message is an unfinished answer that ends with text.
    """
    if not messages:
        raise ValueError("messages must have at least one message, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Message):
            raise ValueError(f"messages[{index}] must be a Message, got {type(message).__name__}")
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise ValueError(f"{where}: role must be one of {', '.join(ROLES)}, got {quoted(message.role)}")
        _check_message(message, f"{where} ({message.role})")
    role = messages[-1].role
    if continue_final_message:
        if role != ASSISTANT or not isinstance((messages[-1].parts or (None,))[-1], TextPart):
            raise ValueError(
                f"messages[{len(messages) - 1}] ({role}): with continue_final_message the last message must "
                f"be from {ASSISTANT} and end with text, which the model continues"
            )
    elif role not in LAST_ROLES:
        raise ValueError(
            f"messages[{len(messages) - 1}] ({role}): the last message must be from "
            f"{' or '.join(LAST_ROLES)}, because the model answers it"
        )


def images_of(messages: Iterable[Message]) -> tuple[Image, ...]:
    """Return all images in the order of the conversation."""
    return tuple(part.image for message in messages for part in message.parts if isinstance(part, ImagePart))


def videos_of(messages: Iterable[Message]) -> tuple[Video, ...]:
    """Return all videos in the order of the conversation."""
    return tuple(part.video for message in messages for part in message.parts if isinstance(part, VideoPart))


def sounds_of(messages: Iterable[Message]) -> tuple[tuple[Sound, bool], ...]:
    """Return all sounds in their order, and whether each is a video's."""
    heard = (
        (part.sound, False) if isinstance(part, AudioPart) else (part.video.sound, True)
        for message in messages
        for part in message.parts
        if isinstance(part, (AudioPart, VideoPart))
    )
    return tuple((sound, of_video) for sound, of_video in heard if sound is not None)


def _check_message(message: Message, where: str) -> None:
    if not isinstance(message.fields, Mapping) or {"role", "content"} & set(message.fields):
        raise ValueError(f"{where}: fields must be a mapping without role and content")
    if isinstance(message.content, str):
        return
    if not isinstance(message.content, (list, tuple)):
        raise ValueError(
            f"{where}: content must be a string or a sequence of parts, got {quoted(message.content)}"
        )
    for index, part in enumerate(message.content):
        place = f"{where}: content[{index}]"
        if isinstance(part, TextPart):
            if not isinstance(part.text, str):
                raise ValueError(f"{place}: text must be a string, got {quoted(part.text)}")
        elif isinstance(part, ImagePart):
            try:
                check_image(part.image)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        elif isinstance(part, VideoPart):
            if not isinstance(part.video, Video):
                raise ValueError(f"{place}: video must be a Video, got {type(part.video).__name__}")
        elif isinstance(part, AudioPart):
            if not isinstance(part.sound, Sound):
                raise ValueError(f"{place}: sound must be a Sound, got {type(part.sound).__name__}")
        else:
            raise ValueError(
                f"{place} must be TextPart, ImagePart, VideoPart or AudioPart, got {type(part).__name__}"
            )
