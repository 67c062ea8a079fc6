# SPDX-License-Identifier: Apache-2.0
"""Keys of an observation: images by camera, state, and the task.

openpi fixes no names: each robot has its own, mostly flat ones, such as `observation/image`. A key may also
lead through maps: `images/cam_high` is the value at `cam_high` of the map at `images`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.echo import printable, quoted

PREFIXES = ("observation.images.", "observation.image.", "observation.")  # of LeRobot's names
STATE_KEY, PROMPT_KEY = "observation/state", "prompt"


@dataclass(frozen=True)
class ObservationKeys:
    """Where an observation has what a policy takes."""

    cameras: tuple[str, ...]  # of the policy
    images: tuple[str, ...]  # key of each camera's image
    state: tuple[str, ...]  # keys whose values make the state, one after the other; empty = no state
    prompt: str = PROMPT_KEY

    def __post_init__(self) -> None:
        if len(self.cameras) != len(self.images):
            raise ValueError(f"{len(self.images)} keys of images for {len(self.cameras)} cameras")
        keys = (*self.images, *self.state, self.prompt)
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated or "" in keys:
            raise ValueError(f"keys must be different and not empty, got {quoted(list(keys))}")


def default_image_key(camera: str) -> str:
    """Return the key of a camera's image: `observation/` and the camera's short name."""
    prefix = next((each for each in PREFIXES if camera.startswith(each)), "")
    return f"observation/{camera[len(prefix) :]}"


def make_keys(
    cameras: Sequence[str], *, images: Mapping[str, str], state: Sequence[str], prompt: str, has_state: bool
) -> ObservationKeys:
    """Return the keys for a policy.

    - images: key by camera; the others have `default_image_key`
    - state, prompt: empty = the default keys

    ValueError for a camera that the policy does not have, keys of a state that it does not take, and keys
    that are not different.
    """
    unknown = [camera for camera in images if camera not in cameras]
    if unknown:
        raise ValueError(f"unknown camera {quoted(unknown[0])}; the policy has {', '.join(cameras)}")
    if state and not has_state:
        raise ValueError(f"this policy takes no state, but {quoted(state[0])} is a key of it")
    return ObservationKeys(
        cameras=tuple(cameras),
        images=tuple(images.get(camera) or default_image_key(camera) for camera in cameras),
        state=(tuple(state) or (STATE_KEY,)) if has_state else (),
        prompt=prompt or PROMPT_KEY,
    )


@dataclass(frozen=True)
class Observation:
    """What an observation has for a policy."""

    images: dict[str, np.ndarray]  # uint8 [H, W, 3], RGB, by camera; without those that are not there
    state: np.ndarray | None  # float32 [S]
    prompt: str


def read_observation(message: Any, keys: ObservationKeys) -> Observation:
    """Read an observation.

    ValueError names a key that is missing, or has a wrong value.
    """
    if not isinstance(message, dict):
        raise ValueError(f"an observation must be a map, got {type(message).__name__}")
    images = {}
    for camera, key in zip(keys.cameras, keys.images, strict=True):
        image = _at(message, key)
        if image is not None:
            images[camera] = _image(image, key)
    if not images:
        raise ValueError(f"no image: expected {', '.join(keys.images)}; {_present(message)}")
    prompt = _at(message, keys.prompt)
    if not isinstance(prompt, (str, type(None))):
        raise ValueError(f"{keys.prompt} must be a text, got {type(prompt).__name__}")
    parts = [_values(_at(message, key), key, message) for key in keys.state]
    return Observation(images, np.concatenate(parts) if parts else None, prompt or "")


def _at(message: dict, key: str) -> Any:
    """Return the value at a key, flat or through maps; None if there is none."""
    if key in message:
        return message[key]
    value: Any = message
    for part in key.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _image(value: Any, key: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 3:
        raise ValueError(f"{key} must be an image uint8 [H, W, 3] or [3, H, W], got {_told(value)}")
    if value.shape[2] != 3 and value.shape[0] == 3:
        value = value.transpose(1, 2, 0)
    if value.shape[2] != 3 or 0 in value.shape:
        raise ValueError(f"{key} must be an image uint8 [H, W, 3] or [3, H, W], got {_told(value)}")
    return np.ascontiguousarray(value)


def _values(value: Any, key: str, message: dict) -> np.ndarray:
    if value is None:
        raise ValueError(f"{key} is missing; {_present(message)}")
    if isinstance(value, list) and all(type(each) in (bool, int, float) for each in value):
        value = np.array(value, np.float64)
    if isinstance(value, (bool, int, float)):
        value = np.float64(value)
    if not isinstance(value, (np.ndarray, np.generic)) or value.ndim > 1:
        raise ValueError(f"{key} must be a number or numbers [S], got {_told(value)}")
    with np.errstate(over="ignore"):  # values that are not finite are refused with the state
        return np.atleast_1d(value).astype(np.float32)


def _told(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _present(message: dict) -> str:
    return f"the observation has {printable(', '.join(map(str, message)) or 'no keys')}"
