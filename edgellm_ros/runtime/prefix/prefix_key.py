# SPDX-License-Identifier: Apache-2.0
"""Cache keys of prompt tokens.

The key of a text token is the token id; the key of an encoder row is the content hash of its image or sound,
and the index of the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine_directory.config import SpecialTokens
from edgellm_ros.runtime.request import LLMGenerationRequest

Key = int | str


def prefix_keys(
    token_ids: Sequence[int],
    request: LLMGenerationRequest,
    image_tokens: Sequence[int],
    audio_tokens: Sequence[int],
    special_tokens: SpecialTokens,
) -> list[Key]:
    """Return a key for each token of a prompt.

    The key is the token id, or "<content>:<i>" for the i-th row of an image or sound. image_tokens,
    audio_tokens: number of rows of each image and sound. Prompts with the same first n keys have the same
    first n KV rows, whatever follows.
    """
    keys: list[Key] = list(token_ids)
    images = [content_hash(image) for image in request.prompt_images]
    sounds = [content_hash(sound.samples, sound.sample_rate) for sound in request.prompt_audio]
    _replace(keys, special_tokens.image_token_id, images, image_tokens)
    _replace(keys, special_tokens.audio_token_id, sounds, audio_tokens)
    return keys


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
