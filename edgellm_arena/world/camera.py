# SPDX-License-Identifier: Apache-2.0
"""The robot's forward camera: a pinhole camera fixed to the base and pitched down.

Pixel coordinates are continuous. Their origin is the top left corner of the image, so the centre of the first
pixel is (0.5, 0.5). `rays` have depth 1: the factor t along a ray is the depth of the point.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Camera:
    """Intrinsics in pixels; pose in the base frame in metres and radians."""

    width: int = 320
    height: int = 224
    focal: float = 160.0
    x: float = -0.10
    z: float = 0.50
    pitch: float = float(np.deg2rad(20.0))  # down

    @property
    def axes(self) -> NDArray[np.float64]:
        """Return the camera's axes in the base frame as rows [3, 3]: right, down, forward."""
        cos, sin = np.cos(self.pitch), np.sin(self.pitch)
        return np.array([[0.0, -1.0, 0.0], [-sin, 0.0, -cos], [cos, 0.0, -sin]])

    @property
    def horizon(self) -> float:
        """Return the row of the horizon."""
        return self.height / 2 - self.focal * float(np.tan(self.pitch))

    def project(self, points: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Project points [N, 3] of the base frame to pixels [N, 2] and depths [N].

        A pixel is (u right, v down). Pixels of points with depth <= 0 are meaningless.
        """
        seen = (np.asarray(points, np.float64) - [self.x, 0.0, self.z]) @ self.axes.T
        depth = seen[:, 2]
        safe = np.where(np.abs(depth) < 1e-9, 1e-9, depth)
        centre = [self.width / 2, self.height / 2]
        return seen[:, :2] * (self.focal / safe)[:, None] + centre, depth

    def project_floor(self, points: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Project floor points [N, 2] of the base frame to pixels [N, 2] and depths [N]."""
        points = np.asarray(points, np.float64)
        return self.project(np.concatenate([points, np.zeros((len(points), 1))], 1))

    def scaled(self, factor: int) -> Camera:
        """Return the same camera with `factor` times fewer pixels on each axis."""
        return Camera(
            self.width // factor, self.height // factor, self.focal / factor, self.x, self.z, self.pitch
        )


CAMERA = Camera()


@lru_cache(maxsize=4)
def rays(camera: Camera) -> NDArray[np.float32]:
    """Return the ray through each pixel's centre, [3, H, W], in the base frame.

    Rays have depth 1. The array is cached and read-only.
    """
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
