# SPDX-License-Identifier: Apache-2.0
"""Parts of a message in JSON: text, images, videos and sounds.

as files             {"type": "image", "image": "frame.png"}, {"type": "audio", "audio": "voice.wav"}
of OpenAI's API      {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
                     {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
videos               {"type": "video", "frames": ["0.png", "1.png"], "timestamps": [0.0, 0.5]}, in seconds
                     {"type": "video", "frames": ["0.png", "1.png"], "fps": 2}
                     {"type": "video", "video": "clip.mp4", "fps": 2}
with their sound     {"type": "video", "video": "clip.mp4", "fps": 2, "audio": "clip.wav"}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.echo import quoted
from edgellm_ros.io.image_file import read_image
from edgellm_ros.io.sound_file import ACCEPTED
from edgellm_ros.messages.json_checks import check_object, described
from edgellm_ros.messages.media_sources import decode_base64, find_source

if TYPE_CHECKING:
    import numpy as np

    from edgellm_ros.multimodal.sound import Sound
    from edgellm_ros.multimodal.video import Video
    from edgellm_ros.runtime.conversation import Part, VideoPart

KINDS = ("text", "image", "image_url", "video", "audio", "input_audio")
DETAILS = ("auto", "low", "high")  # of OpenAI's image_url; the engine decides about the size
SOUND_FORMATS = tuple(name.lower() for name in ACCEPTED.values())

ReadSound = Callable[[Path | bytes], "Sound"]
ReadImage = Callable[[Path | bytes], "np.ndarray"]


@dataclass(frozen=True)
class FileReaders:
    """Functions that read files for one engine, and the folder of relative names.

    Without a folder no file is read: images and sounds are in the text itself.
    """

    sound: ReadSound
    video: Callable[[Path, float], Video]  # path, frames per second to sample
    folder: Path | None = None
    image: ReadImage = read_image


def read_part(data: Any, where: str, readers: FileReaders) -> Part:
    """Read a part of a message's content.

    ValueError names the place of what is wrong, `where` and below.
    """
    from edgellm_ros.runtime.conversation import AudioPart, ImagePart, TextPart

    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(data, dict) and kind not in KINDS:
        raise ValueError(f"{where}.type: expected one of {', '.join(KINDS)}, got {quoted(kind)}")
    if kind == "video":
        return _video(data, where, readers)
    check_object(data, where, ("type", str(kind)), required=(str(kind),))
    value, place = data[kind], f"{where}.{kind}"
    if kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"{place}: expected a string, got {described(value)}")
        return TextPart(value)
    if kind == "image":
        return ImagePart(read_media(readers.image, "image", readers.folder, value, place))
    if kind == "image_url":
        return ImagePart(read_media(readers.image, "image", readers.folder, _url(value, place), place))
    if kind == "audio":
        return AudioPart(read_media(readers.sound, "audio", readers.folder, value, place))
    return AudioPart(_sound(value, place, readers))


def read_media(
    read: Callable[[Path | bytes], Any], kind: str, folder: Path | None, given: Any, where: str
) -> Any:
    """Read an image or a sound from what `find_source` takes."""
    try:
        return read(find_source(given, folder, kind))
    except (ValueError, OSError) as error:
        raise ValueError(f"{where}: {error}") from None


def _url(data: Any, where: str) -> Any:
    """Return the URL of OpenAI's image_url."""
    check_object(data, where, ("url", "detail"), required=("url",))
    detail = data.get("detail", "auto")
    if detail not in DETAILS:
        raise ValueError(f"{where}.detail: expected one of {', '.join(DETAILS)}, got {quoted(detail)}")
    return data["url"]


def _sound(data: Any, where: str, readers: FileReaders) -> Sound:
    """Decode OpenAI's input_audio."""
    check_object(data, where, ("data", "format"), required=("data", "format"))
    name = data["format"]
    if name not in SOUND_FORMATS:
        raise ValueError(f"{where}.format: expected one of {', '.join(SOUND_FORMATS)}, got {quoted(name)}")
    try:
        contents = decode_base64(data["data"])
        found = ACCEPTED.get(contents[:4])
        if found is not None and found.lower() != name:
            raise ValueError(f"the sound is {found}, but its format is {name!r}")
        return readers.sound(contents)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _video(data: dict[str, Any], where: str, readers: FileReaders) -> VideoPart:
    from edgellm_ros.runtime.conversation import VideoPart

    video = _frames(data, where, readers)
    if "audio" not in data:
        return VideoPart(video)
    sound = read_media(readers.sound, "audio", readers.folder, data["audio"], f"{where}.audio")
    return VideoPart(dataclasses.replace(video, sound=sound))


def _frames(data: dict[str, Any], where: str, readers: FileReaders) -> Video:
    """Read a video without its sound."""
    from edgellm_ros.multimodal.video import Video

    if "video" in data:
        check_object(data, where, ("type", "video", "fps", "audio"), required=("fps",))
        fps = data["fps"]
        if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
            raise ValueError(f"{where}.fps: expected a positive number, got {described(fps)}")
        return _video_file(data["video"], fps, f"{where}.video", readers)
    check_object(data, where, ("type", "frames", "timestamps", "fps", "audio"), required=("frames",))
    names = data["frames"]
    if not isinstance(names, list):
        raise ValueError(f"{where}.frames: expected a list of file names, got {described(names)}")
    frames = [
        read_media(readers.image, "image", readers.folder, name, f"{where}.frames[{index}]")
        for index, name in enumerate(names)
    ]
    try:
        return Video(frames, data.get("timestamps"), data.get("fps"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _video_file(given: Any, fps: float, where: str, readers: FileReaders) -> Video:
    try:
        source = find_source(given, readers.folder, "video")
        if isinstance(source, bytes):
            raise ValueError("a video is read from a file, not from a data: URL")
        return readers.video(source, fps)
    except (ValueError, OSError) as error:
        raise ValueError(f"{where}: {error}") from None
