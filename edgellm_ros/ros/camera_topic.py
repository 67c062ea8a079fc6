# SPDX-License-Identifier: Apache-2.0
"""Names and topics of a policy's cameras. Does not need ROS."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.echo import quoted


def camera_topic(name: str) -> str:
    """Return the topic of a further camera: ~/wrist/image for wrist.

    What a topic cannot have becomes a "_": ~/observation_image2/image for observation.image2.
    """
    token = re.sub("[^A-Za-z0-9]+", "_", name).strip("_")
    return f"~/{token if token[:1].isalpha() else f'camera_{token}'}/image"


def camera_names(given: Sequence[str], policy: PolicyConfig | None) -> tuple[str, ...]:
    """Return the robot's cameras, by the parameter `cameras`; () without a policy.

    Without names: all cameras of the policy. ValueError for a camera that the policy does not have, a
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
