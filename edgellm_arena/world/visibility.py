# SPDX-License-Identifier: Apache-2.0
"""Decides which solids a person would name in the picture.

A solid counts as seen if enough pixels show it and enough of it is neither occluded nor outside the picture.
Between seen and unseen is a range where a solid counts as unclear. Scoring ignores unclear solids. Training
ignores them except as the target of a drive.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from edgellm_arena.world.camera import CAMERA
from edgellm_arena.world.renderer import identify
from edgellm_arena.world.scene import Scene
from edgellm_arena.world.unicycle import State, to_base

_SCALE = 2  # pixels are counted in a picture of half the size
_SEEN_PIXELS, _UNSEEN_PIXELS = 60, 16  # in the full picture
_SEEN_SHARE, _UNSEEN_SHARE = 0.40, 0.12


class Sight(IntEnum):
    """Visibility of a solid."""

    UNSEEN = 0
    UNCLEAR = 1
    SEEN = 2


def sights(scene: Scene, pose: State) -> list[Sight]:
    """Return the visibility of every solid of the scene, in its order."""
    ids, alone = identify(scene, pose, _SCALE)
    feet = to_base(pose, np.array([[s.x, s.y] for s in scene.solids]).reshape(-1, 2))
    result = []
    for index, (x, y) in enumerate(feet):
        pixels = int((ids == index).sum()) * _SCALE**2
        if pixels == 0:
            result.append(Sight.UNSEEN)
            continue
        share = pixels / (int(alone[index]) * _SCALE**2) * _inside(scene, index, float(x), float(y))
        if pixels >= _SEEN_PIXELS and share >= _SEEN_SHARE:
            result.append(Sight.SEEN)
        elif pixels <= _UNSEEN_PIXELS or share <= _UNSEEN_SHARE:
            result.append(Sight.UNSEEN)
        else:
            result.append(Sight.UNCLEAR)
    return result


def _inside(scene: Scene, index: int, x: float, y: float) -> float:
    """Compute the share of the solid's width between the picture's side borders."""
    ahead = x - CAMERA.x
    distance = np.hypot(ahead, y)
    half = np.arcsin(min(scene.solids[index].radius / distance, 0.99))
    bearing, edge = np.arctan2(y, ahead), np.arctan(CAMERA.width / 2 / CAMERA.focal)
    low, high = max(bearing - half, -edge), min(bearing + half, edge)
    return float(np.clip((high - low) / (2 * half), 0.0, 1.0))
