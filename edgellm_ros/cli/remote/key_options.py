# SPDX-License-Identifier: Apache-2.0
"""Options for the keys of an observation in openpi's protocol."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from edgellm_ros.echo import quoted
from edgellm_ros.openpi.keys import PROMPT_KEY, STATE_KEY, ObservationKeys, make_keys


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add the options that `read_keys` reads."""
    group = parser.add_argument_group(
        "keys of an observation",
        "flat names as the robot sends them, or a path through maps: images/cam_high",
    )
    group.add_argument(
        "--image-key",
        action="append",
        default=[],
        metavar="CAMERA=KEY",
        help="key of a camera's image; repeat for each camera (default: observation/CAMERA)",
    )
    group.add_argument(
        "--state-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key of the state; repeat for a state in several parts, in the policy's order (default: "
        f"{STATE_KEY})",
    )
    group.add_argument(
        "--prompt-key", default=PROMPT_KEY, metavar="KEY", help="key of the task (default: %(default)s)"
    )


def read_keys(args: argparse.Namespace, cameras: Sequence[str], has_state: bool) -> ObservationKeys:
    """Return the keys for a policy. ValueError names the option."""
    images: dict[str, str] = {}
    for text in args.image_key:
        camera, _, key = text.partition("=")
        if not camera or not key or camera in images:
            raise ValueError(f"--image-key: expected CAMERA=KEY once for a camera, got {quoted(text)}")
        images[camera] = key
    return make_keys(
        cameras, images=images, state=args.state_key, prompt=args.prompt_key, has_state=has_state
    )
