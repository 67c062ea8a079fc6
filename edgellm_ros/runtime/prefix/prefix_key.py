# SPDX-License-Identifier: Apache-2.0
"""Cache keys of prompt tokens.

The key of a text token is the token id; the key of an encoder row is the content hash of its image, sound or
group of video frames, and the index of the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine_directory.config import SpecialTokens
from edgellm_ros.multimodal.device_image import DeviceImage, Image
from edgellm_ros.runtime.request import LLMGenerationRequest

Key = int | str


@dataclass(frozen=True)
class FrameGroup:
    """Frames of a video that become one group of encoder rows."""

    frames: Sequence[Image]
    rows: int  # of tokens; the size to which frames are resized depends on the whole video
    columns: int
    time: float  # from the video's first group on mRoPE's time axis; words in the prompt tell other times

    def content_hash(self) -> str:
        """Return a hash of all that the group's encoder rows and positions depend on."""
        frames = [image_key(frame) for frame in self.frames]
        return content_hash(np.array([self.time]), "video", self.rows, self.columns, frames)


def prefix_keys(
    token_ids: Sequence[int],
    request: LLMGenerationRequest,
    *,
    image_tokens: Sequence[int],
    audio_tokens: Sequence[int],
    special_tokens: SpecialTokens,
    groups: Sequence[FrameGroup] = (),
    video_token_id: int | None = None,
) -> list[Key]:
    """Return a key for each token of a prompt.

    The key is the token id, or "<content>:<i>" for the i-th row of an image, sound or group of video frames.
    image_tokens, audio_tokens: number of rows of each image and sound. groups: of all videos. Prompts with
    the same first n keys have the same first n KV rows, whatever follows.
    """
    keys: list[Key] = list(token_ids)
    images = [image_key(image) for image in request.prompt_images]
    sounds = [content_hash(sound.samples, sound.sample_rate) for sound in request.prompt_audio]
    _replace(keys, special_tokens.image_token_id, images, image_tokens)
    _replace(keys, special_tokens.audio_token_id, sounds, audio_tokens)
    frames = [group.content_hash() for group in groups]
    _replace(keys, video_token_id, frames, [group.rows * group.columns for group in groups])
    return keys


def image_key(image: Image) -> str:
    """Return the hash of an image's contents, or the key of one on a GPU."""
    return image.key if isinstance(image, DeviceImage) else content_hash(image)


def content_hash(array: np.ndarray, *more: object) -> str:
    """Return a hash of an array's type, shape and values, and of `more`.

    The first 32 hexadecimal digits of the SHA-256. Takes 1 ms for a frame of 640 x 480.
    """
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} {more}\n".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def _replace(keys: list[Key], placeholder: int | None, contents: list[str], counts: Sequence[int]) -> None:
    places = [index for index, key in enumerate(keys) if key == placeholder]
    rows = [(content, row) for content, count in zip(contents, counts, strict=True) for row in range(count)]
    for index, (content, row) in zip(places, rows, strict=True):
        keys[index] = f"{content}:{row}"
