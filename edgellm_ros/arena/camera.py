# SPDX-License-Identifier: Apache-2.0
"""The robot's forward camera: a pinhole, fixed to the base, pitched down.

Pixel coordinates are continuous with the origin at the image's top left corner: the centre of the first
pixel is (0.5, 0.5). Distances along a ray are counted in depth, so that t along `rays` is the depth of the
point.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Camera:
    """Intrinsics in pixels, pose in the base frame in metres and radians."""

    width: int = 320
    height: int = 224
    focal: float = 160.0
    x: float = -0.10
    z: float = 0.50
    pitch: float = float(np.deg2rad(20.0))  # down

    @property
    def axes(self) -> NDArray[np.float64]:
        """Rows: the camera's right, down and forward axes in the base frame [3, 3]."""
        cos, sin = np.cos(self.pitch), np.sin(self.pitch)
        return np.array([[0.0, -1.0, 0.0], [-sin, 0.0, -cos], [cos, 0.0, -sin]])

    @property
    def horizon(self) -> float:
        """The row of the horizon."""
        return self.height / 2 - self.focal * float(np.tan(self.pitch))

    def project(self, points: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Base-frame points [N, 3] to pixels [N, 2] (u right, v down) and depth [N]; a pixel means nothing
        at depth <= 0.
        """
        seen = (np.asarray(points, np.float64) - [self.x, 0.0, self.z]) @ self.axes.T
        depth = seen[:, 2]
        safe = np.where(np.abs(depth) < 1e-9, 1e-9, depth)
        centre = [self.width / 2, self.height / 2]
        return seen[:, :2] * (self.focal / safe)[:, None] + centre, depth

    def project_floor(self, points: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Floor points [N, 2] of the base frame to pixels [N, 2] and depth [N]."""
        points = np.asarray(points, np.float64)
        return self.project(np.concatenate([points, np.zeros((len(points), 1))], 1))

    def scaled(self, factor: int) -> Camera:
        """The same camera with `factor` times fewer pixels on each axis."""
        return Camera(
            self.width // factor, self.height // factor, self.focal / factor, self.x, self.z, self.pitch
        )


CAMERA = Camera()


@lru_cache(maxsize=4)
def rays(camera: Camera) -> NDArray[np.float32]:
    """Ray through each pixel's centre in the base frame [3, H, W], of depth 1. Read-only: it is shared."""
    u = (np.arange(camera.width) + 0.5 - camera.width / 2) / camera.focal
    v = (np.arange(camera.height) + 0.5 - camera.height / 2) / camera.focal
    right, down, forward = camera.axes
    rays_ = (
        forward[:, None, None]
        + right[:, None, None] * u[None, None, :]
        + down[:, None, None] * v[None, :, None]
    ).astype(np.float32)
    rays_.setflags(write=False)
    return rays_
