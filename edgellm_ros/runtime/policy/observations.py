# SPDX-License-Identifier: Apache-2.0
"""Observations of a request to a policy: of now, and of the times before.

A policy that takes O > 1 observations, `dt` apart, gets for each camera [O,H,W,3] and a state [O,D], oldest
first. Of fewer, the oldest one is repeated, as LeRobot does when a robot starts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm_ros.multimodal.device_image import DeviceImage, Image
from edgellm_ros.multimodal.image_pixels import check_image


def observed_images(camera: str, image: Image, steps: int) -> np.ndarray:
    """Check a camera's images and fill them up. ValueError.

    Returns [H,W,3] for one step, [steps,H,W,3] for several.
    """
    if isinstance(image, DeviceImage):
        raise ValueError(f"camera {camera}: images of a policy are resized on the host: give it there")
    several = steps > 1 and isinstance(image, np.ndarray) and image.ndim == 4
    if several and not 1 <= len(image) <= steps:
        raise ValueError(f"camera {camera}: the policy takes 1 to {steps} images, got {len(image)}")
    try:
        check_image(image[0] if several else image)
    except ValueError as error:
        raise ValueError(f"camera {camera}: {error}") from None
    if steps == 1:
        return image
    return _filled(image if several else image[None], steps)


def observed_states(state: Any, steps: int) -> list[Any]:
    """Return a state for each of `steps` observations, none of which has been checked.

    ValueError for more than `steps`.
    """
    given = np.asarray(state) if isinstance(state, (list, tuple)) else state
    if steps == 1 or not isinstance(given, np.ndarray) or given.ndim != 2:
        return [state] * steps
    if not 1 <= len(given) <= steps:
        raise ValueError(f"the policy takes 1 to {steps} states, got {len(given)}")
    return list(_filled(given, steps))


def _filled(values: np.ndarray, steps: int) -> np.ndarray:
    """Repeat the oldest of observations [k,...] so that there are `steps`."""
    return np.concatenate([np.repeat(values[:1], steps - len(values), axis=0), values])
