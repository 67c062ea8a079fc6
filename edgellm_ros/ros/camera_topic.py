# SPDX-License-Identifier: Apache-2.0
"""The topic of a policy's camera."""

from __future__ import annotations

import re


def camera_topic(name: str) -> str:
    """Return the topic of a further camera: ~/wrist/image for wrist.

    What a topic cannot have becomes a "_": ~/observation_image2/image for observation.image2.
    """
    token = re.sub("[^A-Za-z0-9]+", "_", name).strip("_")
    return f"~/{token if token[:1].isalpha() else f'camera_{token}'}/image"
