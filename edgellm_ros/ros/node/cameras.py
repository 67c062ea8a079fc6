# SPDX-License-Identifier: Apache-2.0
"""The cameras of a policy: the first one publishes on ~/image, each further one on a topic of its own."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.echo import quoted
from edgellm_ros.ros.camera_topic import camera_topic
from edgellm_ros.ros.messaging import NANOSECONDS
from edgellm_ros.ros.node.input_time import Frame, StaleInputError


def camera_names(given: Sequence[str], policy: PolicyConfig | None) -> tuple[str, ...]:
    """Return the cameras of the robot, by the parameter `cameras`; () without a policy.

    Without names they are all cameras of the policy. ValueError for a camera that the policy does not have, a
    repeated one, two with one topic, and for names without a policy.
    """
    names = tuple(name for name in given if name)
    if policy is None:
        if names:
            raise ValueError(f"parameter cameras is for policies, this engine is none: got {quoted(names)}")
        return ()
    known = policy.cameras.names
    names = names or known
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(
            f"parameter cameras must be different cameras of {', '.join(known)}, got "
            f"{quoted(', '.join(names))}"
        )
    topics = [camera_topic(name) for name in names[1:]]
    if len(set(topics)) < len(topics):
        raise ValueError(f"parameter cameras: {', '.join(names)} have the same topics {', '.join(topics)}")
    return names


class Cameras:
    """The newest frame of each further camera. Filled by callbacks; may be read on any thread."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Hold no frames of cameras with these names, the first of which is that of ~/image."""
        self.names = names
        self.topics = {name: camera_topic(name) for name in names[1:]}
        self._newest: dict[str, Frame] = {}

    def add(self, name: str, frame: Frame) -> None:
        """Store a frame of a further camera."""
        self._newest[name] = frame

    def newest(self) -> tuple[Frame | None, ...]:
        """Return the newest frame of each further camera; None if none has arrived."""
        return tuple(self._newest.get(name) for name in self.topics)

    def clear(self) -> None:
        """Drop all frames."""
        self._newest = {}

    def beside(
        self, first: Frame, further: tuple[Frame | None, ...], tolerance_s: float
    ) -> tuple[Frame, ...]:
        """Return the frames of all cameras: that of ~/image, and those which `newest` returned with it.

        StaleInputError for a frame that is missing, or stamped more than `tolerance_s` before or after the
        first.
        """
        frames = [first]
        for (name, topic), frame in zip(self.topics.items(), further, strict=True):
            if frame is None:
                raise StaleInputError(
                    f"no frame of the camera {quoted(name)} has arrived on {topic} (parameter cameras)"
                )
            if first.time is not None and frame.time is not None:
                apart_s = (frame.time - first.time) / NANOSECONDS
                if abs(apart_s) > tolerance_s:
                    than = "newer" if apart_s > 0 else "older"
                    raise StaleInputError(
                        f"the frame of the camera {quoted(name)} is {abs(apart_s):.2f} s {than} than that on "
                        f"~/image, limit {tolerance_s:g} s (parameter camera_tolerance)"
                    )
            frames.append(frame)
        return tuple(frames)
