# SPDX-License-Identifier: Apache-2.0
"""Keys of an observation: images by camera, state, and the task. Needs no NumPy.

openpi fixes no names: each robot has its own, mostly flat ones, such as `observation/image`. A key may also
lead through maps: `images/cam_high` is the value at `cam_high` of the map at `images`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgellm_ros.echo import quoted

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
