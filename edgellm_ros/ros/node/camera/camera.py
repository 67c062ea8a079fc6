# SPDX-License-Identifier: Apache-2.0
"""The camera on the robot: projects floor points to pixels of its frames."""

from __future__ import annotations

from dataclasses import dataclass, field

import cv2
import numpy as np

from edgellm_ros.ros.node.settings.camera import CameraParameters

NEAR = 0.05  # metres in front of the camera; nearer points are not drawn
WIDEST = 5.0  # tangent of the largest angle from the optical axis that a lens other than a fisheye can show
SAMPLES = 2000  # of the angle, where the end of the distortion model is searched


@dataclass(frozen=True, eq=False)
class Intrinsics:
    """Focal lengths, principal point and lens of a camera, in pixels of its frames."""

    matrix: np.ndarray  # [3, 3]
    # As OpenCV orders them: none, 4 or 5 (plumb_bob), 8 (rational_polynomial), 4 with `fisheye` (equidistant)
    distortion: np.ndarray = field(default_factory=lambda: np.zeros(0))
    fisheye: bool = False
    # From the camera's axes to those of the frame [3, 3]; stereo cameras rotate frames when they rectify them
    rectification: np.ndarray = field(default_factory=lambda: np.eye(3))

    def limit(self) -> float:
        """Return the tangent of the angle up to which the model of the lens is valid.

        Beyond it the polynomial bends back: far points would appear in the middle of the frame.
        """
        if not len(self.distortion):
            return np.inf
        angle = np.linspace(0, np.arctan(WIDEST) if not self.fisheye else np.pi / 2 - 1e-3, SAMPLES)
        k = np.zeros(8)
        k[: len(self.distortion)] = self.distortion
        if self.fisheye:
            radius = angle * (1 + sum(k[i] * angle ** (2 * i + 2) for i in range(4)))
        else:
            r2 = np.tan(angle) ** 2
            above, below = (1 + a * r2 + b * r2**2 + c * r2**3 for a, b, c in (k[[0, 1, 4]], k[[5, 6, 7]]))
            radius = np.tan(angle) * above / below
        bends = np.flatnonzero(np.diff(radius) <= 0)
        return float(np.tan(angle[bends[0]] if len(bends) else angle[-1]))


@dataclass(frozen=True, eq=False)
class CameraPose:
    """Where the camera is in the robot's base frame (REP 103)."""

    axes: np.ndarray  # [3, 3]; rows: right, down, ahead
    position: np.ndarray  # [3] in metres


@dataclass(frozen=True, eq=False)
class Camera:
    """A calibrated camera on the robot."""

    intrinsics: Intrinsics
    pose: CameraPose

    def project(self, points: np.ndarray) -> np.ndarray:
        """Project floor points [N, 2] (x ahead, y left) to pixels [N, 2].

        Points behind the camera, and those that the model of its lens does not cover, become NaN.
        """
        intrinsics = self.intrinsics
        rotation = intrinsics.rectification @ self.pose.axes
        translation = -rotation @ self.pose.position
        floor = np.column_stack([points, np.zeros(len(points))]).astype(np.float64)
        project = cv2.fisheye.projectPoints if intrinsics.fisheye else cv2.projectPoints
        pixels, _ = project(
            floor[:, None],
            cv2.Rodrigues(rotation)[0],
            translation,
            intrinsics.matrix,
            intrinsics.distortion if len(intrinsics.distortion) else None,
        )
        seen = floor @ rotation.T + translation
        depth = seen[:, 2]
        visible = (depth > NEAR) & (np.hypot(seen[:, 0], seen[:, 1]) <= intrinsics.limit() * depth)
        return np.where(visible[:, None], pixels.reshape(-1, 2), np.nan)


def camera_of(parameters: CameraParameters) -> Camera:
    """Return the camera that the parameters describe."""
    fx, fy, cx, cy = parameters.fx, parameters.fy, parameters.cx, parameters.cy
    sin, cos = np.sin(parameters.pitch), np.cos(parameters.pitch)
    axes = np.array([[0.0, -1.0, 0.0], [-sin, 0.0, -cos], [cos, 0.0, -sin]])
    pose = CameraPose(axes, np.array([parameters.x, 0.0, parameters.height]))
    return Camera(Intrinsics(np.array([[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]])), pose)
