# SPDX-License-Identifier: Apache-2.0
"""Renders moments of an episode for people: larger, and with shadows."""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from edgellm_tabletop.simulation import mujoco, open_renderer
from edgellm_tabletop.world import Tabletop, add_mark

CAMERA = {"lookat": (0.15, 0.0, 0.08), "distance": 0.58, "azimuth": 146.0, "elevation": -32.0}


class Studio:
    """A camera beside the table. `close` frees the renderer."""

    def __init__(self, world: Tabletop, size: tuple[int, int]) -> None:
        """Make pictures of a world; OSError without OpenGL.

        size: width and height in pixels.
        """
        self.size, self._goal = size, world.goal
        self._model = copy.copy(world.model)
        self._model.vis.global_.offwidth, self._model.vis.global_.offheight = size
        self._model.vis.quality.offsamples, self._model.vis.quality.shadowsize = 4, 2048
        self._data = mujoco.MjData(self._model)
        self._renderer = open_renderer(self._model, *size)
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        self._camera.lookat[:] = CAMERA["lookat"]
        self._camera.distance, self._camera.azimuth = CAMERA["distance"], CAMERA["azimuth"]
        self._camera.elevation = CAMERA["elevation"]

    def picture(self, pose: NDArray) -> NDArray[np.uint8]:
        """Render the world [H, W, 3], RGB, with all joints of the simulation at `pose`."""
        self._data.qpos[:] = pose
        mujoco.mj_forward(self._model, self._data)
        self._renderer.update_scene(self._data, camera=self._camera)
        add_mark(self._renderer.scene, self._goal)
        return self._renderer.render()

    def project(self, points: NDArray) -> NDArray[np.float64]:
        """Return the pixels [N, 2] (x, y) of points [N, 3] in m, after a picture."""
        left, right = self._renderer.scene.camera
        place, forward, up = ((getattr(left, n) + getattr(right, n)) / 2 for n in ("pos", "forward", "up"))
        away = np.asarray(points) - place
        depth = away @ forward
        high = left.frustum_top / left.frustum_near  # half of the picture at a distance of 1
        scale = self.size[1] / 2 / high / depth
        x, y = away @ np.cross(forward, up) * scale, away @ up * scale
        return np.stack([self.size[0] / 2 + x, self.size[1] / 2 - y], -1)

    def close(self) -> None:
        """Free the renderer."""
        self._renderer.close()
