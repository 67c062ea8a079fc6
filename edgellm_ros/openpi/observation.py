# SPDX-License-Identifier: Apache-2.0
"""Reads the observation in a message of openpi's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.echo import printable
from edgellm_ros.openpi.keys import ObservationKeys


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
