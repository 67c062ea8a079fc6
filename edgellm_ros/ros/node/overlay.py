# SPDX-License-Identifier: Apache-2.0
"""Draws predicted paths on the camera frame of their plan."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

COLORS = ((40, 220, 90), (60, 170, 255), (255, 190, 40), (240, 90, 200))  # RGB, by sample
OUTLINE = (20, 20, 20)
NEAR = 0.05  # metres in front of the camera; nearer points are not drawn
SUBPIXEL_BITS = 4


@dataclass(frozen=True)
class OverlayCamera:
    """A pinhole camera on the robot, looking ahead and down."""

    fx: float  # focal lengths and principal point in pixels
    fy: float
    cx: float
    cy: float
    height: float  # m above the floor
    x: float  # m ahead of the base frame's origin
    pitch: float  # rad downwards

    def project(self, points: np.ndarray) -> np.ndarray:
        """Project floor points [N, 2] (x ahead, y left) to pixels [N, 2].

        Points behind the camera become NaN.
        """
        sin, cos = np.sin(self.pitch), np.cos(self.pitch)
        # Rows are the camera's axes (right, down, ahead) in the base frame (REP 103).
        rotation = np.array([[0.0, -1.0, 0.0], [-sin, 0.0, -cos], [cos, 0.0, -sin]])
        translation = -rotation @ np.array([self.x, 0.0, self.height])
        floor = np.column_stack([points, np.zeros(len(points))]).astype(np.float64)
        matrix = np.array([[self.fx, 0.0, self.cx], [0.0, self.fy, self.cy], [0.0, 0.0, 1.0]])
        pixels, _ = cv2.projectPoints(floor, cv2.Rodrigues(rotation)[0], translation, matrix, None)
        depth = floor @ rotation[2] + translation[2]
        return np.where((depth > NEAR)[:, None], pixels.reshape(-1, 2), np.nan)


def draw_paths(image: np.ndarray, paths: np.ndarray, camera: OverlayCamera) -> np.ndarray:
    """Draw paths on the floor of a copy of the frame.

    `image` [H, W, 3] uint8 RGB; `paths` [n, T+1, 2+] (x, y, ...) in metres.
    """
    canvas = np.ascontiguousarray(image).copy()
    thickness = max(1, round(image.shape[1] / 160))
    for index, path in reversed(list(enumerate(paths))):
        pixels = camera.project(np.asarray(path)[:, :2])
        pixels = pixels[np.isfinite(pixels).all(axis=1)]
        if not len(pixels):
            continue
        # Far outside of the frame OpenCV's fixed-point coordinates would overflow.
        pixels = np.clip(pixels, -1e4, 1e4)
        fixed = np.round(pixels * (1 << SUBPIXEL_BITS)).astype(np.int32).reshape(-1, 1, 2)
        color = COLORS[index % len(COLORS)]
        for stroke, width in ((OUTLINE, thickness + 2), (color, thickness)):
            cv2.polylines(canvas, [fixed], False, stroke, width, cv2.LINE_AA, SUBPIXEL_BITS)
        end = tuple(int(v) for v in fixed[-1, 0])
        cv2.circle(canvas, end, (thickness + 1) << SUBPIXEL_BITS, color, -1, cv2.LINE_AA, SUBPIXEL_BITS)
    return canvas
