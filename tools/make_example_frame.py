# SPDX-License-Identifier: Apache-2.0
"""Make examples/frame.png: the robot's view at the start of an arena episode.

A red box is in view, and a grey block in the way, which can be passed on either side.

Examples
--------
    python tools/make_example_frame.py

"""

from __future__ import annotations

from pathlib import Path

import cv2

from edgellm_arena.episodes.episode import World, make_episode

EPISODE = 22
FRAME = Path(__file__).parents[1] / "examples" / "frame.png"


def main() -> None:
    """Write the frame."""
    frame = World(make_episode(EPISODE)).camera()
    if not cv2.imwrite(str(FRAME), frame[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 9]):
        raise OSError(f"{FRAME}: not written")


if __name__ == "__main__":
    main()
